"""The choice between plans, and the measurements that it stands on."""
