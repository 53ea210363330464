"""Documents out of whatever holds them: files of many kinds and packings, web archives, URLs, `datasets`."""
