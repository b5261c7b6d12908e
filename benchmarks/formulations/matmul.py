"""Gradients of linear layers and of attention's products."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.formulations.conv import product
from benchmarks.formulations.harness import Array, Case, Emitter


def linear_cases(rows: int, d: int, f: int) -> Iterator[Case]:
    """x [rows, d] times w [d, f], seen as two-dimensional: leading axes are a view."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    x, w, dy, name = normal(rows, d), normal(d, f), normal(rows, f), f"{rows}x{d}x{f}"
    y = {"MatMul": lambda op, x, w: op("MatMul", x, w), "Gemm": lambda op, x, w: op("Gemm", x, w)}
    dx = {
        "Gemm transB": lambda op, dy, w: op("Gemm", dy, w, transB=1),
        "Transpose": lambda op, dy, w: op("MatMul", dy, op.transpose(w, 1, 0)),
    }
    dw = {
        "Gemm transA": lambda op, dy, x: op("Gemm", x, dy, transA=1),
        "Transpose": lambda op, dy, x: op("MatMul", op.transpose(x, 1, 0), dy),
    }
    db = {
        "ones": lambda op, dy: op("MatMul", op.floats(np.ones((1, rows))), dy),
        "ReduceSum": lambda op, dy: op.sum(dy, 0, keep=True),
    }
    yield Case("matmul", f"y  {name}", {"x": x, "w": w}, torch.mm, y, "MatMul")
    yield Case("matmul", f"dx {name}", {"dy": dy, "w": w}, lambda dy, w: dy @ w.t(), dx, "Gemm transB")
    yield Case("matmul", f"dw {name}", {"dy": dy, "x": x}, lambda dy, x: x.t() @ dy, dw, "Transpose")
    yield Case("matmul", f"db {rows}x{f}", {"dy": dy}, lambda dy: dy.sum(0, keepdim=True), db, "ones")


def attention_cases(b: int, h: int, t: int, d: int) -> Iterator[Case]:
    """Products of queries, keys and values [b, h, t, d] and scores [b, h, t, t]."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((b, h, t, d), np.float32), rng.standard_normal((b, h, t, d), np.float32)
    s, x = rng.standard_normal((b, h, t, t), np.float32), rng.standard_normal((b, t, h, d), np.float32)
    name = f"{b}x{h}x{t}x{d}"

    def convolved(op: Emitter, q: str, k: str) -> str:
        return op.reshape(product(op, q, k, b * h, t, t, d), b, h, t, t)

    def transposed(op: Emitter, s: str, k: str) -> str:
        return op.transpose(op("MatMul", op.transpose(k, 0, 1, 3, 2), s), 0, 1, 3, 2)

    scores = {
        "A·Bᵀ": convolved,
        "Transpose": lambda op, q, k: op("MatMul", q, op.transpose(k, 0, 1, 3, 2)),
        "Einsum": lambda op, q, k: op("Einsum", q, k, equation="bhid,bhjd->bhij"),
    }
    left = {
        "other side": transposed,
        "Transpose": lambda op, s, k: op("MatMul", op.transpose(s, 0, 1, 3, 2), k),
    }
    plain = {"MatMul": lambda op, s, k: op("MatMul", s, k)}
    heads = {"Transpose": lambda op, x: op.transpose(x, 0, 2, 1, 3)}
    yield Case("matmul", f"Q Kᵀ  {name}", {"q": q, "k": k}, lambda q, k: q @ k.mT, scores, "A·Bᵀ")
    yield Case("matmul", f"S V   {name}", {"s": s, "k": k}, torch.matmul, plain, "MatMul")
    yield Case("matmul", f"Sᵀ dO {name}", {"s": s, "k": k}, lambda s, k: s.mT @ k, left, "other side")
    yield Case("matmul", f"heads {name}", {"x": x}, lambda x: x.permute(0, 2, 1, 3).contiguous(), heads, "Transpose")


def cases(batch: int) -> Iterator[Case]:
    """A small GPT's shapes and an image network's classifier."""
    yield from linear_cases(128 * batch, 384, 1536)
    yield from linear_cases(128 * batch, 1536, 384)
    yield from linear_cases(batch, 512, 1000)
    yield from attention_cases(batch, 6, 128, 64)
    yield from attention_cases(batch // 2, 12, 256, 64)
