"""What a program takes: bytes, operations, seconds of each stage, for the simulator and the formulas."""
