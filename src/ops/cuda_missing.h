// Operations that have no CUDA twin yet, X(name, Args) each, of ops/ops.h, attention/band.h, and attention/compress.h
// with select.h: on a CUDA device they throw Error by name, and the tests' CUDA runs expect it. Whoever adds a twin
// takes its row out here; the linker finds a row too many or too few.
#pragma once

#define ANNULUS_OPS_WITHOUT_CUDA(X)
#define ANNULUS_BAND_OPS_WITHOUT_CUDA(X)
// clang-format off
#define ANNULUS_NSA_OPS_WITHOUT_CUDA(X)      \
  X(block_mean, BlockMean)                   \
  X(block_mean_backward, BlockMeanBackward)  \
  X(unfold_blocks, UnfoldBlocks)             \
  X(fold_blocks, FoldBlocks)                 \
  X(nsa_bounds, NsaBounds)                   \
  X(select_blocks, SelectBlocks)             \
  X(selected_forward, SelectedForward)       \
  X(selected_backward, SelectedBackward)     \
  X(gather_blocks, GatherBlocks)
// clang-format on
