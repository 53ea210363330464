"""Parts of documents that should not be trained on: repeated passages, boilerplate lines, repeated pages, test sets."""
