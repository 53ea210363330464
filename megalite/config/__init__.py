"""What the user chose, checked, and the numbers that follow."""
