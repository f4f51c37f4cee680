"""Calls of recurrent layers: a batch of 6 sequences of 3 steps, 4 features, 2 hidden."""

from .sample import call, data, x

# Initial states, then weights and biases of every layer and direction.
SAMPLES = [
    *(call(f"{name}.input", x(3, 6, 4), x(1, 6, 2), [x(rows, 4), x(rows, 2), x(rows), x(rows)], True, 1, 0.0, False,
        False, False) for name, rows in (("gru", 6), ("rnn_tanh", 2), ("rnn_relu", 2))),
    call("lstm.input", x(6, 3, 4), [data(2, 6, 2), x(2, 6, 2)], [x(8, 4), x(8, 2), x(8, 4), x(8, 2)], False, 1, 0.0,
        False, True, True),
    call("lstm.input", x(3, 6, 4), [x(2, 6, 2), x(2, 6, 2)], [x(8, 4), x(8, 2), x(8, 2), x(8, 2)], False, 2, 0.0,
        False, False, False),
]  # fmt: skip
