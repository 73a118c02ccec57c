// Banded attention forward of one token a sequence, without carried state, where few query heads share a KV head: a
// step of generation. Memory is the limit then, and the strips of band_forward.cpp would leave lanes empty: here a
// head's columns lie along them, rows of k and v are read in the order of memory, and threads share the keys.
#pragma once

#include "attention/band.h"

namespace annulus::attention::cpu {

bool is_one_token(const BandForward& args);
std::int64_t one_token_bytes(const BandForward& args);  // of workspace
void one_token_forward(Context& ctx, const BandForward& args, void* workspace);

}  // namespace annulus::attention::cpu
