"""Gradient reduction and ZeRO: buckets, all-gathers, reduce-scatters, no_sync."""
