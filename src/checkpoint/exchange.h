// Texts between ranks, over the host communicator. All collective.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace annulus::checkpoint {

std::vector<std::string> gather_texts(parallel::Communicator& world,
                                      const std::string& text);                      // by rank, on every rank
std::string broadcast_text(parallel::Communicator& world, const std::string& text);  // rank 0's
std::int64_t reduce_max(parallel::Communicator& world, std::int64_t value);

// Runs `work`, which makes no collective call, on every rank. Where it throws on some rank, every rank throws a
// CheckpointError with the message of the first such rank: nobody goes on alone, nobody waits.
void agree(parallel::Communicator& world, const std::function<void()>& work);

}  // namespace annulus::checkpoint
