"""PipeDream-2BW (`schedule="1f1b_2bw"`)."""
