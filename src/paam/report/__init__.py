"""HTML reports of run records. They read events and nothing else."""
