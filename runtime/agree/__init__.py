"""What all ranks must have alike, compared: how they begin, every call, copies of parameters."""
