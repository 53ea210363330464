"""Near-duplicate removal: documents whose sets of word n-grams overlap by more than a threshold, found out of core."""
