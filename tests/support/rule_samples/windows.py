"""Calls of convolutions, pooling, resizing and padding."""

from .sample import call, x

SPACE = {1: (6,), 2: (4, 6), 3: (2, 4, 4)}

SAMPLES = [
    # convolutions: plain, in groups, one channel a group, unbatched, with a bias, transposed
    call("conv1d", x(2, 4, 6), x(6, 4, 3), x(6)),
    call("conv1d", x(4, 6), x(6, 4, 3)),
    call("conv1d", x(2, 12, 6), x(12, 1, 3), x(12), [1], [2], [1], 12),
    call("conv1d", x(2, 12, 6), x(24, 2, 3), None, [1], [0], [1], 6),
    call("conv1d", x(2, 7, 6), x(7, 1, 3), x(7), [1], [2], [1], 7),
    call("conv2d", x(2, 5, 4, 4), x(7, 5, 3, 3), x(7)),
    call("conv_transpose1d", x(2, 7, 6), x(7, 1, 3), None, [2], [0], [0], 7),
    call("conv1d.padding", x(2, 4, 6), x(6, 4, 3), x(6), [1], "same"),
    call("conv2d", x(2, 4, 6, 6), x(6, 4, 3, 3), x(6), [1, 1], [1, 1]),
    call("conv2d", x(2, 6, 4, 4), x(6, 1, 3, 3), None, [1, 1], [2, 2], [2, 2], 6),
    call("conv2d", x(2, 4, 6, 6), x(4, 1, 3, 3), groups=4),
    call("conv2d", x(2, 12, 4, 4), x(24, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], 6),
    call("conv2d", x(2, 1, 6, 6), x(4, 1, 6, 6)),
    call("conv2d", x(2, 4, 6, 6), x(6, 4, 3, 3), stride=[2, 2]),
    call("conv3d", x(2, 4, 3, 4, 4), x(6, 4, 1, 2, 2), x(6)),
    call("conv3d", x(2, 12, 3, 4, 4), x(12, 2, 1, 2, 2), groups=6),
    call("conv_transpose1d", x(2, 4, 6), x(4, 6, 3), x(6), [2]),
    call("conv_transpose1d", x(2, 12, 6), x(12, 4, 3), None, [1], [0], [0], 6),
    call("conv_transpose2d.input", x(2, 4, 3, 3), x(4, 6, 2, 2), x(6), [2, 2]),
    call("conv_transpose2d.input", x(2, 12, 3, 3), x(12, 2, 2, 2), None, [2, 2], [0, 0], [0, 0], 6),
    call("conv_transpose3d.input", x(2, 4, 2, 3, 3), x(4, 6, 1, 2, 2)),
    call("convolution", x(2, 4, 6), x(6, 4, 3), x(6), [1], [0], [1], False, [0], 1),
    call("convolution", x(2, 12, 6), x(12, 2, 3), None, [2], [0], [1], True, [1], 6),
    # pooling
    *(call(f"max_pool{n}d", x(2, 6, *SPACE[n]), [2] * n) for n in SPACE),
    *(call(f"max_pool{n}d_with_indices", x(2, 6, *SPACE[n]), [2] * n) for n in (2, 3)),
    *(call(f"avg_pool{n}d", x(2, 6, *SPACE[n]), [2] * n) for n in SPACE),
    *(call(f"adaptive_avg_pool{n}d", x(2, 6, *SPACE[n]), [2] * n) for n in SPACE),
    *(call(f"adaptive_max_pool{n}d", x(2, 6, *SPACE[n]), [2] * n) for n in SPACE),
    call("max_pool2d", x(4, 6, 6), [3, 3], [1, 1], [1, 1]),
    call("avg_pool2d", x(2, 4, 6, 6), [3, 3], [1, 1], [1, 1]),
    call("adaptive_avg_pool2d", x(2, 4, 6, 6), [1, 1]),
    # resizing and sampling
    *(call(f"upsample_{kind}{n}d", x(2, 6, *SPACE[n]), [8] * n, *corners) for kind, n, corners in (
        ("nearest", 1, ()), ("nearest", 2, ()), ("nearest", 3, ()), ("linear", 1, (True,)), ("bilinear", 2, (False,)),
        ("bicubic", 2, (True,)), ("trilinear", 3, (False,)))),
    call("_upsample_nearest_exact2d", x(2, 6, 4, 4), [6, 8]),
    call("_upsample_bilinear2d_aa", x(2, 6, 4, 4), [6, 3], False),
    call("_upsample_bicubic2d_aa", x(2, 6, 4, 4), [6, 3], False),
    call("upsample_bilinear2d.vec", x(2, 6, 4, 4), [8, 8], True, None),
    call("upsample_nearest2d.vec", x(2, 6, 4, 4), None, [2.0, 2.0]),
    call("grid_sampler_2d", x(2, 6, 4, 4), x(2, 3, 3, 2, low=-0.9), 0, 0, False),
    call("grid_sampler_3d", x(2, 6, 4, 2, 2), x(2, 3, 3, 2, 3, low=-0.9), 0, 0, False),
    call("pixel_shuffle", x(2, 12, 4, 4), 2),
    call("pixel_unshuffle", x(2, 6, 4, 4), 2),
    call("channel_shuffle", x(2, 6, 4, 4), 3),
    # padding and windows
    call("pad", x(6, 4), [1, 2]),
    call("pad", x(2, 6, 4), [0, 0, 1, 2], "constant", 3.0),
    call("constant_pad_nd", x(6, 4), [0, 2], 1.0),
    call("pad", x(2, 6, 4), [1, 1], "reflect"),
    call("pad", x(2, 6, 4), [1, 1], "replicate"),
    call("pad", x(2, 6, 4), [1, 2], "circular"),
    call("pad", x(6, 4), [1, -1]),
    call("unfold", x(6, 12, 4), 1, 3, 2),
    call("unfold", x(6, 4), -1, 2, 1),
    call("im2col", x(2, 6, 4, 4), [3, 3], [1, 1], [1, 1], [1, 1]),
    call("im2col", x(6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    call("col2im", x(2, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
]  # fmt: skip
