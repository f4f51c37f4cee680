"""Explanations of a plan (`plan.why`), notes for the user, and errors for unusable mesh axes."""
