"""What is known of a traced graph before anything is chosen: roles, what dims are made of, strategies."""
