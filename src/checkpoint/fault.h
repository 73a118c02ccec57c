// Fault injection: named points of a save at which a test, or the environment, can strike.
//
// ANNULUS_FAULT="point[:rank][@step]" kills the process with SIGKILL when it first reaches the point (of that rank; in
// the save of that step or a later one). A feature of the program, so that a whole run can be tested: Writer's
// constructor refuses a name that is no point. Points marked * are rank 0's.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

namespace annulus::checkpoint {

inline constexpr std::array<std::string_view, 17> kFaultPoints = {
    "before_folder",        // slices are copied, nothing is on disk
    "after_shard_create",   //
    "after_first_dataset",  //
    "mid_datasets",         // between two blocks (<= 4 MiB) of a shard, so many times
    "before_shard_close",   //
    "before_shard_fsync",   // closed, perhaps not on disk
    "after_shard",          //
    "before_gather",        // this rank's part is done, in finish()
    "before_virtual_file",  // *
    "after_virtual_file",   // *
    "before_manifest",      // *
    "mid_manifest",         // * half of its text is written
    "after_manifest",       // * synced, not renamed
    "after_rename",         // * committed
    "before_prune",         // *
    "during_prune",         // * renamed to .trash-…, not deleted
    "mid_delete",           // * one file of it is deleted
};

// Called at every point reached, on the thread that reaches it; an exception it throws is a failure of that rank's
// writer. Empty: none.
void set_fault_hook(std::function<void(std::string_view point)> hook);

// For the store itself.
void check_fault_environment();
void reach(std::string_view point, int rank, std::int64_t step);

}  // namespace annulus::checkpoint
