"""Repair of texts: encoding, line ends, control characters, blanks, Unicode form."""
