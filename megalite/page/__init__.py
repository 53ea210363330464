"""What every page that megalite writes is made of: HTML as nested calls, numbers as people read them, one style."""
