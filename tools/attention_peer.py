#!/usr/bin/env python3
"""PyTorch's attention (cuDNN) at the dense cases of `annulus bench --device cuda`, to be run on the same machine right
after it: python3 tools/attention_peer.py [FILTER]. One line a case and direction: shape, milliseconds, TFLOP/s; the
median of CUDA events, of both layouts the faster. FLOPs as annulus bench counts them."""
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = [(32, 8, 128, n * 4096) for n in (1, 2, 4, 8, 16, 32)] + [(64, 8, 128, n * 4096) for n in (1, 2, 4, 8, 16, 32)]
CASES += [(32, 8, 64, 8192), (32, 8, 64, 32768), (32, 32, 128, 32768), (32, 1, 128, 32768)]


def median_ms(call):
    times = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(63):
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
        if len(times) >= 5 and sum(times) >= 500:
            break
    return sorted(times)[len(times) // 2]


def measure(heads, kv_heads, dim, tokens, layout):
    def normal(h):
        shape = (1, tokens, h, dim) if layout == "bshd" else (1, h, tokens, dim)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return (x.transpose(1, 2) if layout == "bshd" else x).detach().requires_grad_()

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        forward_ms = median_ms(forward)
        o = forward()
        d_o = torch.randn_like(o)
        backward_ms = median_ms(lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True))
    return forward_ms, backward_ms


print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
for heads, kv_heads, dim, tokens in CASES:
    shape = f"{heads}/{kv_heads} D {dim} S {tokens} causal"
    if not any(word in shape for word in sys.argv[1:] or [""]):
        continue
    both = [measure(heads, kv_heads, dim, tokens, layout) for layout in ("bshd", "bhsd")]
    flops = 2 * tokens**2 * dim * heads
    for name, ms, times in (("forward", min(b[0] for b in both), 1), ("backward", min(b[1] for b in both), 2.5)):
        print(f"attention_{name:<9} {shape:<40} {ms:10.3f} ms {times * flops / ms * 1e-9:8.1f} TFLOP/s", flush=True)
