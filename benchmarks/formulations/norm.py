"""BatchNormalization."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.formulations.harness import Case


def F(op, v):
    return op.constant(v, np.float32)


def cases(batch: int = 8) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for c, side in ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)):
        n, hw = batch, side * side
        count = n * hw
        x = rng.standard_normal((n, c, side, side), np.float32) * 2 + 1
        dy = rng.standard_normal((n, c, side, side), np.float32)
        g, b = rng.random(c, np.float32) + 0.5, rng.standard_normal(c, np.float32)
        zero, one = np.zeros(c, np.float32), np.ones(c, np.float32)
        T = torch.from_numpy
        rm, rv = torch.zeros(c), torch.ones(c)
        tm, tv = T(x).mean((0, 2, 3)), T(x).var((0, 2, 3), unbiased=False)
        ti = (tv + 1e-5) ** -0.5

        def fwd(x, g, b):
            y, m, i = torch.ops.aten.native_batch_norm(x, g, b, rm, rv, True, 0.1, 1e-5)
            return y, m, 1 / (i * i)

        def ort_bn(op, x, g, b):
            y, m, v = op.many("BatchNormalization", x, g, b, F(op, zero), F(op, one), outputs=3, training_mode=1, momentum=0.0, epsilon=1e-5)
            return y, m, op("Add", v, op.scalar(1e-5))

        def finish(op, x, g, b, mean, var):
            y = op("BatchNormalization", x, g, b, mean, var, epsilon=1e-5)
            return y, mean, op("Add", var, op.scalar(1e-5))

        def dots(op, a, b):
            d = op("Conv", op.reshape(a, 1, n * c, side, side), op.reshape(b, n * c, 1, side, side), group=n * c)
            return op.sum(op.reshape(d, n, c), 0)

        def moments(op, x, g, b):
            mean = op("Mul", op.sum(x, 0, 2, 3), op.scalar(1 / count))
            sq = op("Mul", dots(op, x, x), op.scalar(1 / count))
            return finish(op, x, g, b, mean, op("Sub", sq, op("Mul", mean, mean)))

        def twopass(op, x, g, b):
            mean = op("Mul", op.sum(x, 0, 2, 3), op.scalar(1 / count))
            xc = op("Sub", x, op.reshape(mean, c, 1, 1))
            return finish(op, x, g, b, mean, op("Mul", dots(op, xc, xc), op.scalar(1 / count)))

        def twopass_centred(op, x, g, b):
            mean = op("Mul", op.sum(x, 0, 2, 3), op.scalar(1 / count))
            xc = op("Sub", x, op.reshape(mean, c, 1, 1))
            var = op("Mul", dots(op, xc, xc), op.scalar(1 / count))
            return op("BatchNormalization", xc, g, b, F(op, zero), var, epsilon=1e-5), mean, op("Add", var, op.scalar(1e-5))

        def shifted(op, x, g, b):
            # variance about each image's mean: sum over n of (sq - hw*mean_n^2) ...
            s = op.reshape(op.sum(op.reshape(x, n, c, hw), 2), n, c)
            mean = op("Mul", op.sum(s, 0), op.scalar(1 / count))
            sq = op("Mul", dots(op, x, x), op.scalar(1 / count))
            return finish(op, x, g, b, mean, op("Sub", sq, op("Mul", mean, mean)))

        def layernorm(op, x, g, b):
            # LayerNormalization of each image's channel: its mean and inverse deviation, robustly
            _, m, i = op.many("LayerNormalization", op.reshape(x, n * c, hw), F(op, np.ones(hw)), outputs=3, axis=1, epsilon=0.0)
            m, i = op.reshape(m, n, c), op.reshape(i, n, c)
            mean = op("ReduceMean", m, op.constant([0]), keepdims=0)
            d = op("Sub", m, mean)
            var = op("ReduceMean", op("Add", op("Reciprocal", op("Mul", i, i)), op("Mul", d, d)), op.constant([0]), keepdims=0)
            return finish(op, x, g, b, mean, var)

        def tr_first(op, x, g, b):
            v = op("ReduceSumSquare", op("Sub", x, op.reshape(op("ReduceMean", x, op.constant([0, 2, 3]), keepdims=0), c, 1, 1)), op.constant([0, 2, 3]), keepdims=0)
            mean = op("ReduceMean", x, op.constant([0, 2, 3]), keepdims=0)
            return finish(op, x, g, b, mean, op("Mul", v, op.scalar(1 / count)))

        yield Case("bn", f"fwd {n}x{c}x{side}x{side}", {"x": x, "g": g, "b": b}, fwd, {"BN training": ort_bn, "moments": moments, "twopass": twopass, "twopass centred": twopass_centred, "layernorm": layernorm})

        def bwd(dy, x, g, m, i):
            return torch.ops.aten.native_batch_norm_backward(dy, x, g, rm, rv, m, i, True, 1e-5, [True] * 3)

        def sums(op, dy, x, g, m, i, how):
            db = op.sum(dy, 0, 2, 3)
            raw = dots(op, dy, x) if how == "dots" else op.sum(op("Mul", dy, x), 0, 2, 3)
            dg = op("Mul", op("Sub", raw, op("Mul", m, db)), i)
            a = op("Mul", g, i)
            k = op("Mul", op("Mul", op("Mul", a, i), dg), op.scalar(-1 / count))  # of x
            k0 = op("Sub", op("Mul", op("Mul", a, db), op.scalar(-1 / count)), op("Mul", k, m))
            return a, k, k0, dg, db

        col = lambda op, v: op.reshape(v, c, 1, 1)

        def plain(op, dy, x, g, m, i, how="dots"):
            a, k, k0, dg, db = sums(op, dy, x, g, m, i, how)
            return op("Add", op("Mul", dy, col(op, a)), op("Add", op("Mul", x, col(op, k)), col(op, k0))), dg, db

        def bninf(op, dy, x, g, m, i, how="dots"):
            a, k, k0, dg, db = sums(op, dy, x, g, m, i, how)
            affine = op("BatchNormalization", x, k, k0, F(op, zero), F(op, one), epsilon=0.0)
            return op("Add", op("Mul", dy, col(op, a)), affine), dg, db

        def bninf2(op, dy, x, g, m, i, how="dots"):
            a, k, k0, dg, db = sums(op, dy, x, g, m, i, how)
            k, k0 = op("Div", k, a), op("Div", k0, a)
            affine = op("Add", dy, op("BatchNormalization", x, k, k0, F(op, zero), F(op, one), epsilon=0.0))
            return op("Mul", affine, col(op, a)), dg, db

        def dwconv(op, dy, x, g, m, i):
            a, k, k0, dg, db = sums(op, dy, x, g, m, i, "dots")
            affine = op("Conv", x, op.reshape(k, c, 1, 1, 1), k0, group=c)
            return op("Add", op("Mul", dy, col(op, a)), affine), dg, db

        def pairconv(op, dy, x, g, m, i):
            a, k, k0, dg, db = sums(op, dy, x, g, m, i, "dots")
            both = op("Concat", op.reshape(dy, n, c, 1, hw), op.reshape(x, n, c, 1, hw), axis=2)
            w = op("Concat", op.reshape(a, c, 1, 1, 1), op.reshape(k, c, 1, 1, 1), axis=1)
            return op("Conv", op.reshape(both, n, 2 * c, side, side), w, k0, group=c), dg, db

        inputs = {"dy": dy, "x": x, "g": g, "m": tm.numpy(), "i": ti.numpy()}
        yield Case("bn", f"bwd {n}x{c}x{side}x{side}", inputs, bwd, {"plain": plain, "plain mul": lambda *v: plain(*v, how="mul"), "bninf": bninf, "bninf mul": lambda *v: bninf(*v, how="mul"), "bninf2": bninf2, "dwconv": dwconv, "pair": pairconv}, 2e-3)
