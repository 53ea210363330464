"""Many runs of one config: what is tried, where it runs, what came of it."""
