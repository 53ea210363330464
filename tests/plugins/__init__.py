"""One plug-in of each kind, as somebody outside would write it; docs/extending.md shows these very files."""
