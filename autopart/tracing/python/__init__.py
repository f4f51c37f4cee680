"""Python values, state and side effects of a model's forward, handled during a trace."""
