"""Convolutions: forward, input gradient, weight gradient."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.formulations.harness import Case, Emitter, Formulation


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution: batch, channels in and out, image side, kernel side, stride, groups."""

    n: int
    c: int
    k: int
    side: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1

    @property
    def pad(self) -> int:
        return self.kernel // 2

    @property
    def out(self) -> int:
        return (self.side + 2 * self.pad - self.kernel) // self.stride + 1

    def __str__(self) -> str:
        kind = f"dw{self.c}" if self.groups > 1 else f"{self.c}>{self.k}"
        return f"{kind} {self.kernel}x{self.kernel}/{self.stride} @{self.side} n{self.n}"


RESNET18 = ["3 64 224 7 2", "64 64 56", "64 128 56 3 2", "64 128 56 1 2", "128 128 28", "128 256 28 3 2", "256 256 14", "256 512 14 3 2", "256 512 14 1 2", "512 512 7"]
RESNET50 = ["64 64 56 1", "64 256 56 1", "256 64 56 1", "256 128 56 1", "128 128 56 3 2", "128 512 28 1", "256 512 56 1 2", "512 128 28 1", "256 1024 14 1", "1024 256 14 1", "512 1024 28 1 2", "512 512 14 3 2", "512 2048 7 1", "1024 2048 14 1 2", "2048 512 7 1"]
DENSENET = ["64 128 56 1", "192 128 56 1", "128 32 56", "256 128 56 1", "256 128 28 1", "480 128 28 1", "128 32 28", "512 256 28 1", "640 128 14 1", "128 32 14", "768 128 7 1", "128 32 7"]
MOBILENET = ["3 32 224 3 2", "32 16 112 1", "16 96 112 1", "96 24 56 1", "144 24 56 1", "24 144 56 1", "32 192 28 1", "192 32 28 1", "64 384 14 1", "384 64 14 1", "96 576 14 1", "160 960 7 1", "960 160 7 1", "320 1280 7 1"]
DEPTHWISE = ["32 112 1", "96 112 2", "144 56 1", "144 56 2", "192 28 1", "192 28 2", "384 14 1", "576 14 2", "960 7 1"]


def layers(batch: int) -> dict[str, list[Layer]]:
    def dense(texts: list[str]) -> list[Layer]:
        return [Layer(batch, *(int(part) for part in text.split())) for text in texts]

    wise = [Layer(batch, c, c, side, 3, stride, c) for c, side, stride in (map(int, t.split()) for t in DEPTHWISE)]
    return {"resnet18": dense(RESNET18), "resnet50": dense(RESNET50), "densenet": dense(DENSENET), "mobilenet": dense(MOBILENET), "depthwise": wise}


def backward(layer: Layer, mask: tuple[bool, bool, bool]):
    def run(dy, x, w):
        return torch.ops.aten.convolution_backward(dy, x, w, None, [layer.stride] * 2, [layer.pad] * 2, [1, 1], False, [0, 0], layer.groups, mask)

    return run


def attributes(layer: Layer) -> dict[str, object]:
    return {"strides": [layer.stride] * 2, "pads": [layer.pad] * 4, "group": layer.groups}


# ---- forward

def forward(l: Layer) -> dict[str, Formulation]:
    found = {"Conv": lambda op, x, w: op("Conv", x, w, **attributes(l))}
    if l.kernel == 1 and l.stride == 1:
        def matmul(op, x, w):
            y = op("MatMul", op.reshape(w, l.k, l.c), op.reshape(x, l.n, l.c, l.side**2))
            return op.reshape(y, l.n, l.k, l.side, l.side)
        found["MatMul"] = matmul
    return found


# ---- input gradient

def flip_slice(op: Emitter, w: str) -> str:
    big = -(2**31)
    return op.slice(w, [-1, -1], [big, big], [2, 3], [-1, -1])


def input_gradient(l: Layer) -> dict[str, Formulation]:
    extra = l.side + 2 * l.pad - l.kernel - (l.out - 1) * l.stride

    def transposed(op, dy, w):
        return op("ConvTranspose", dy, w, **attributes(l), output_padding=[extra] * 2)

    def conv_slice(op, dy, w):
        return op("Conv", dy, flip_slice(op, op.transpose(w, 1, 0, 2, 3)), pads=[l.kernel - 1 - l.pad] * 4)

    def conv_gather(op, dy, w):
        taps = l.kernel**2
        rows = op("Gather", op.reshape(w, l.k, l.c, taps), op.constant(range(taps - 1, -1, -1)), axis=2)
        flipped = op.transpose(rows, 1, 0, 2)
        return op("Conv", dy, op.reshape(flipped, l.c, l.k, l.kernel, l.kernel), pads=[l.kernel - 1 - l.pad] * 4)

    def wise_flip(op, dy, w):
        return op("Conv", dy, flip_slice(op, w), pads=[l.kernel - 1 - l.pad] * 4, group=l.groups)

    def matmul(op, dy, w):
        dx = op("MatMul", op.transpose(op.reshape(w, l.k, l.c), 1, 0), op.reshape(dy, l.n, l.k, l.out**2))
        return op.reshape(dx, l.n, l.c, l.out, l.out)

    def spread(op, dx):
        # zeros after each element: [.., o, 1, o, 1] padded to [.., o, s, o, s], cropped where the side is odd
        o, s = l.out, l.stride
        apart = op("Pad", op.reshape(dx, l.n, -1, o, 1, o, 1), op.constant([0] * 6 + [0, 0, 0, s - 1, 0, s - 1]))
        return op.reshape(apart, l.n, -1, o * s, o * s)

    def matmul_spread(op, dy, w):
        dx = spread(op, matmul(op, dy, w))
        return dx if l.out * l.stride == l.side else op.slice(dx, [0, 0], [l.side] * 2, [2, 3])

    def zeros_conv(op, dy, w):
        o = l.out * l.stride
        wide = spread(op, dy)  # o*s; the flipped kernel walks over it
        low = l.kernel - 1 - l.pad
        high = l.side + l.kernel - 1 - low - o
        flipped = flip_slice(op, w if l.groups > 1 else op.transpose(w, 1, 0, 2, 3))
        return op("Conv", wide, flipped, pads=[low, low, high, high], group=l.groups)

    def subpixel(op, dy, w, joined):
        # stride 2: the four parities of dx are convolutions of dy with the taps of that parity
        def taps(parity):  # dx[2i+parity] = sum over kernel index k with k = parity + pad (mod 2): dy[i + (parity + pad - k) / 2]
            ks = [k for k in range(l.kernel) if (k - parity - l.pad) % 2 == 0]
            return ks[::-1], [(parity + l.pad - k) // 2 for k in ks[::-1]]  # offsets ascending

        wt = op.transpose(w, 1, 0, 2, 3)
        parts = []
        half = l.side // 2
        for py in (0, 1):
            for px in (0, 1):
                (ky, oy), (kx, ox) = taps(py), taps(px)
                big = -(2**31)
                # ks descend by 2
                end = lambda k: k[-1] - 1 if k[-1] > 0 else big
                sub = op.slice(wt, [ky[0], kx[0]], [end(ky), end(kx)], [2, 3], [-2, -2])
                pads = [-oy[0], -ox[0], oy[-1] + half - l.out, ox[-1] + half - l.out]
                parts.append(op("Conv", dy, sub, pads=pads))
        if joined == "d2s":
            # DCR: [n, 2, 2, c, h, w] -> [n, c, h, 2, w, 2]
            return op("DepthToSpace", op("Concat", *parts, axis=1), blocksize=2)
        stacked = op("Concat", *(op.reshape(p, l.n, l.c, half, 1, half, 1) for p in parts), axis=-1)  # [.., h, 1, w, 4]
        quad = op.transpose(op.reshape(stacked, l.n * l.c, half, half, 2, 2), 0, 1, 3, 2, 4)
        return op.reshape(quad, l.n, l.c, l.side, l.side)

    def pairs(op, dy, w):
        # each row pair by two convs interleaved with Concat on the last axis
        def taps(parity):
            ks = [k for k in range(l.kernel) if (k - parity - l.pad) % 2 == 0]
            return ks[::-1], [(parity + l.pad - k) // 2 for k in ks[::-1]]

        wt = op.transpose(w, 1, 0, 2, 3)
        half, rows, big = l.side // 2, [], -(2**31)
        for py in (0, 1):
            cols = []
            for px in (0, 1):
                (ky, oy), (kx, ox) = taps(py), taps(px)
                end = lambda k: k[-1] - 1 if k[-1] > 0 else big
                sub = op.slice(wt, [ky[0], kx[0]], [end(ky), end(kx)], [2, 3], [-2, -2])
                pads = [-oy[0], -ox[0], oy[-1] + half - l.out, ox[-1] + half - l.out]
                cols.append(op.reshape(op("Conv", dy, sub, pads=pads), l.n, l.c, half, half, 1))
            rows.append(op.reshape(op("Concat", *cols, axis=4), l.n, l.c, half, 1, l.side))
        return op.reshape(op("Concat", *rows, axis=3), l.n, l.c, l.side, l.side)

    def gemm_col2im(op, dy, w):
        right = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, -1)
        cols = op("Gemm", op.reshape(w, l.k, l.c * l.kernel**2), right, transA=1)
        cols = op.transpose(op.reshape(cols, -1, l.n, l.out**2), 1, 0, 2)
        return op("Col2Im", cols, op.constant([l.side] * 2), op.constant([l.kernel] * 2), pads=[l.pad] * 4, strides=[l.stride] * 2)

    def conv_matmul(op, dy, w):
        taps = l.kernel**2
        reverse = op.constant(np.eye(taps)[::-1], np.float32)
        flipped = op.transpose(op.reshape(op("MatMul", op.reshape(w, l.k * l.c, taps), reverse), l.k, l.c, l.kernel, l.kernel), 1, 0, 2, 3)
        return op("Conv", dy, flipped, pads=[l.kernel - 1 - l.pad] * 4)

    def col2im(op, dy, w):
        cols = op("MatMul", op.transpose(op.reshape(w, l.k, l.c * l.kernel**2), 1, 0), op.reshape(dy, l.n, l.k, l.out**2))
        return op("Col2Im", cols, op.constant([l.side] * 2), op.constant([l.kernel] * 2), pads=[l.pad] * 4, strides=[l.stride] * 2)

    found: dict[str, Formulation] = {"ConvTranspose": transposed}
    if l.groups > 1:
        if l.stride == 1:
            found["Conv flipped"] = wise_flip
        else:
            found["zeros+Conv"] = zeros_conv
        return found
    if l.kernel == 1:
        if l.stride == 1:
            found["MatMul"] = matmul
            found["Conv"] = conv_slice
        else:
            found["MatMul+Pad"] = matmul_spread
        return found
    if l.stride == 1:
        found["Conv Slice"] = conv_slice
        found["Conv MatMul"] = conv_matmul
    else:
        found["parity d2s"] = lambda op, dy, w: subpixel(op, dy, w, "d2s")
        found["parity pairs"] = pairs
    found["Col2Im"] = col2im
    found["Gemm Col2Im"] = gemm_col2im
    return found


# ---- weight gradient

def weight_gradient(l: Layer) -> dict[str, Formulation]:
    s, o, taps = l.stride, l.out, l.kernel**2
    end = max(0, (o - 1) * s + l.kernel - l.side - l.pad)  # padding after x that the taps read
    side = l.side + l.pad + end - (o - 1) * s

    def conv3d(op, dy, x):
        volume = op.reshape(x, 1, l.n, l.c, l.side, l.side)
        weight = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, l.n, 1, o, o)
        dw = op("Conv", volume, weight, pads=[0, l.pad, l.pad, 0, end, end], dilations=[1, s, s])
        dw = op.reshape(dw, l.k, l.c, side, side)
        return dw if side == l.kernel else op.slice(dw, [0, 0], [l.kernel] * 2, [2, 3])

    def conv3d_swapped(op, dy, x):
        # stride 1 only: dy is the volume, x the weight; gives dw[c, k] with taps reversed
        volume = op.reshape(dy, 1, l.n, l.k, o, o)
        weight = op.reshape(op.transpose(x, 1, 0, 2, 3), l.c, l.n, 1, l.side, l.side)
        p = l.kernel - 1 - l.pad
        dw = op.reshape(op("Conv", volume, weight, pads=[0, p, p, 0, p, p]), l.c, l.k, l.kernel, l.kernel)
        return flip_slice(op, op.transpose(dw, 1, 0, 2, 3))

    def conv2d(op, dy, x):
        dw = op("Conv", op.transpose(x, 1, 0, 2, 3), op.transpose(dy, 1, 0, 2, 3), pads=[l.pad, l.pad, end, end], dilations=[s, s])
        dw = dw if side == l.kernel else op.slice(dw, [0, 0], [l.kernel] * 2, [2, 3])
        return op.transpose(dw, 1, 0, 2, 3)

    def channels_last(op, dy, x):
        # x as an image of n channels, side rows and side*c columns: a tap is c columns wide
        wide = op.reshape(op.transpose(x, 0, 2, 3, 1), 1, l.n, l.side, l.side * l.c)
        weight = op.transpose(dy, 1, 0, 2, 3)
        dw = op("Conv", wide, weight, pads=[l.pad, l.pad * l.c, end, end * l.c], dilations=[s, s * l.c])
        dw = op.reshape(dw, l.k, side, side, l.c)
        dw = dw if side == l.kernel else op.slice(dw, [0, 0], [l.kernel] * 2, [1, 2])
        return op.transpose(dw, 0, 3, 1, 2)

    def channels_last_swapped(op, dy, x):
        # dy as the image, x the weight; stride 1
        wide = op.reshape(op.transpose(dy, 0, 2, 3, 1), 1, l.n, o, o * l.k)
        weight = op.transpose(x, 1, 0, 2, 3)
        p = l.kernel - 1 - l.pad
        dw = op("Conv", wide, weight, pads=[p, p * l.k] * 2, dilations=[1, l.k])
        dw = op.reshape(dw, l.c, l.kernel, l.kernel, l.k)
        return flip_slice(op, op.transpose(dw, 3, 0, 1, 2))

    def padded(op, x):
        return op("Pad", x, op.constant([0, 0, l.pad, l.pad] * 2)) if l.pad else x

    def tap(op, x, i, j):
        return op.slice(x, [i, j], [i + (o - 1) * s + 1, j + (o - 1) * s + 1], [2, 3], [s, s])

    def tap_gemm(op, dy, x):
        # both with channels first: dw[:, :, i, j] = dy [k, n*o*o] x tap [c, n*o*o] transposed
        left = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, -1)
        right = padded(op, op.transpose(x, 1, 0, 2, 3))
        parts = [op("Gemm", left, op.reshape(tap(op, right, i, j), l.c, -1), transB=1) for i in range(l.kernel) for j in range(l.kernel)]
        stacked = op("Concat", *(op.reshape(p, l.k, l.c, 1) for p in parts), axis=2) if taps > 1 else parts[0]
        return op.reshape(stacked, l.k, l.c, l.kernel, l.kernel)

    def im2col_gemm(op, dy, x):
        left = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, -1)
        right = padded(op, op.transpose(x, 1, 0, 2, 3))
        parts = [op.reshape(tap(op, right, i, j), 1, l.c, -1) for i in range(l.kernel) for j in range(l.kernel)]
        col = op.reshape(op("Concat", *parts, axis=0), taps * l.c, -1)
        dw = op("Gemm", left, col, transB=1)
        return op.reshape(op.transpose(op.reshape(dw, l.k, taps, l.c), 0, 2, 1), l.k, l.c, l.kernel, l.kernel)

    def im2col_gemm_t(op, dy, x):
        left = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, -1)
        right = padded(op, op.transpose(x, 1, 0, 2, 3))
        parts = [op.reshape(tap(op, right, i, j), 1, l.c, -1) for i in range(l.kernel) for j in range(l.kernel)]
        col = op.reshape(op("Concat", *parts, axis=0), taps * l.c, -1)
        dw = op("Gemm", col, left, transB=1)
        return op.reshape(op.transpose(op.reshape(dw, taps, l.c, l.k), 2, 1, 0), l.k, l.c, l.kernel, l.kernel)

    def batched(op, dy, x):
        # [n, k, oo] x [n, oo, c] summed over n
        x = tap(op, x, 0, 0) if s > 1 else x
        right = op.transpose(op.reshape(x, l.n, l.c, o * o), 0, 2, 1)
        dw = op.sum(op("MatMul", op.reshape(dy, l.n, l.k, o * o), right), 0)
        return op.reshape(dw, l.k, l.c, 1, 1)

    def batched_left(op, dy, x):
        x = tap(op, x, 0, 0) if s > 1 else x
        right = op.transpose(op.reshape(dy, l.n, l.k, o * o), 0, 2, 1)
        dw = op.sum(op("MatMul", op.reshape(x, l.n, l.c, o * o), right), 0)
        return op.reshape(op.transpose(dw, 1, 0), l.k, l.c, 1, 1)

    def rows(op, dy, x):
        # both as [n*oo, channels]: Gemm with transA
        x = tap(op, x, 0, 0) if s > 1 else x
        left = op.reshape(op.transpose(dy, 0, 2, 3, 1), -1, l.k)
        right = op.reshape(op.transpose(x, 0, 2, 3, 1), -1, l.c)
        return op.reshape(op("Gemm", left, right, transA=1), l.k, l.c, 1, 1)

    def mixed(op, dy, x):
        # dy as [k, n*oo], x as [n*oo, c]: plain MatMul
        x = tap(op, x, 0, 0) if s > 1 else x
        left = op.reshape(op.transpose(dy, 1, 0, 2, 3), l.k, -1)
        right = op.reshape(op.transpose(x, 0, 2, 3, 1), -1, l.c)
        return op.reshape(op("MatMul", left, right), l.k, l.c, 1, 1)

    def images(op, dy, x):
        # one Gemm an image, each adding to the one before
        x = tap(op, x, 0, 0) if s > 1 else x
        lefts = op.many("Split", dy, outputs=l.n, axis=0, num_outputs=l.n)
        rights = op.many("Split", x, outputs=l.n, axis=0, num_outputs=l.n)
        total: tuple[str, ...] = ()
        for a, b in zip(lefts, rights, strict=True):
            total = (op("Gemm", op.reshape(a, l.k, -1), op.reshape(b, l.c, -1), *total, transB=1),)
        return op.reshape(total[0], l.k, l.c, 1, 1)

    def wise_taps(op, dy, x):
        right = padded(op, x)
        parts = [op.sum(op("Mul", dy, tap(op, right, i, j)), 0, 2, 3) for i in range(l.kernel) for j in range(l.kernel)]
        stacked = op("Concat", *(op.reshape(p, l.c, 1) for p in parts), axis=1)
        return op.reshape(stacked, l.c, 1, l.kernel, l.kernel)

    def wise_group(op, dy, x):
        # every image and channel a group: [1, n*c, h, w] by [n*c, 1, o, o]
        weight = op.reshape(dy, l.n * l.c, 1, o, o)
        dw = op("Conv", op.reshape(x, 1, l.n * l.c, l.side, l.side), weight, pads=[l.pad, l.pad, end, end], dilations=[s, s], group=l.n * l.c)
        dw = op.sum(op.reshape(dw, l.n, l.c, side, side), 0)
        dw = dw if side == l.kernel else op.slice(dw, [0, 0], [l.kernel] * 2, [1, 2])
        return op.reshape(dw, l.c, 1, l.kernel, l.kernel)

    def wise_matmul(op, dy, x):
        right = padded(op, x)
        cols = op("Concat", *(op.reshape(tap(op, right, i, j), l.n * l.c, 1, o * o) for i in range(l.kernel) for j in range(l.kernel)), axis=1)
        dw = op("MatMul", cols, op.reshape(dy, l.n * l.c, o * o, 1))
        return op.reshape(op.sum(op.reshape(dw, l.n, l.c, taps), 0), l.c, 1, l.kernel, l.kernel)

    if l.groups > 1:
        return {"taps": wise_taps, "group conv": wise_group, "im2col MatMul": wise_matmul}
    found = {"Conv3d": conv3d}
    if l.kernel == 1:
        found |= {"batched": batched, "batched x": batched_left, "mixed": mixed, "Gemm cols": tap_gemm, "images": images}
        return found
    if s == 1:
        found["Conv3d swapped"] = conv3d_swapped
        found["NHWC swapped"] = channels_last_swapped
    return found | {"NHWC": channels_last, "tap Gemm": tap_gemm, "im2col Gemm": im2col_gemm, "im2col Gemm T": im2col_gemm_t}


def cases(batch: int = 8) -> Iterator[Case]:
    """Every layer: forward, input gradient, weight gradient."""
    rng = np.random.default_rng(0)
    for group in layers(batch).values():
        for l in group:
            x = rng.standard_normal((l.n, l.c, l.side, l.side), np.float32)
            w = rng.standard_normal((l.k, l.c // l.groups, l.kernel, l.kernel), np.float32)
            dy = rng.standard_normal((l.n, l.k, l.out, l.out), np.float32)
            run = lambda x, w, l=l: torch.ops.aten.convolution(x, w, None, [l.stride] * 2, [l.pad] * 2, [1, 1], False, [0, 0], l.groups)
            yield Case("conv", f"y  {l}", {"x": x, "w": w}, run, forward(l))
            tx, tw = torch.from_numpy(x), torch.from_numpy(w)
            if l.c > 3:
                yield Case("conv", f"dx {l}", {"dy": dy, "w": w}, lambda dy, w, l=l, tx=tx: backward(l, (True, False, False))(dy, tx, w), input_gradient(l))
            yield Case("conv", f"dw {l}", {"dy": dy, "x": x}, lambda dy, x, l=l, tw=tw: backward(l, (False, True, False))(dy, x, tw), weight_gradient(l))
