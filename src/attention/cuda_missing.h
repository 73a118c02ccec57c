// Band operations that have no CUDA twin yet, X(name, Args) each: on a CUDA device they throw Error by name
// (attention/band_dispatch.cpp defines that). Whoever adds a twin to attention/cuda/ takes its row out here; the linker
// finds a row too many or too few. None is missing now.
#pragma once

#define ANNULUS_BAND_OPS_WITHOUT_CUDA(X)
