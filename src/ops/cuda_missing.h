// Operations that have no CUDA twin yet, X(name, Args) each: on a CUDA device they throw Error by name
// (ops/dispatch.cpp defines that), and the operation table's CUDA run expects it. Whoever adds a twin to ops/cuda/
// takes its row out here; the linker finds a row too many or too few.
#pragma once

#define ANNULUS_OPS_WITHOUT_CUDA(X)
