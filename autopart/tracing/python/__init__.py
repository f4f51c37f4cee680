"""Python values, state and side effects of a model's forward during a trace."""
