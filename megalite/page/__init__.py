"""What pages and tables are made of: HTML as nested calls, numbers as people read them, one style."""
