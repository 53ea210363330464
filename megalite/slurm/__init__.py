"""From one config and a cluster profile to a Slurm job that keeps going."""
