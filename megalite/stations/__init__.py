"""What a station of the data route is: a folder made once, whole, by one owner, of small tasks that run anywhere."""
