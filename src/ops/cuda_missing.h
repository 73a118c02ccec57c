// Operations that have no CUDA twin yet, X(name, Args) each, of ops/ops.h and attention/band.h: on a CUDA device they
// throw Error by name, and the tests' CUDA runs expect it. Whoever adds a twin takes its row out here; the linker finds
// a row too many or too few. None is missing now.
#pragma once

#define ANNULUS_OPS_WITHOUT_CUDA(X)
#define ANNULUS_BAND_OPS_WITHOUT_CUDA(X)
