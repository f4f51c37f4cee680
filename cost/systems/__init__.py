"""Other training systems that run a plan, the CPU of a rank, and errors of published runs."""
