#include "parallel/mpi_communicator.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "parallel/heartbeat.h"
#include "parallel/mpi_runtime.h"

namespace annulus::parallel {
namespace {

constexpr int kTags = 1 << 14;  // MPI guarantees tags up to 32767; each operation has two

std::vector<MpiCommunicator*>& live_communicators() {
  static std::vector<MpiCommunicator*> live;
  return live;
}

// Between two polls that found nothing: yields the core at once, and sleeps after a while, because a yielding loop
// still takes about half of a core from the peer it waits for.
class Backoff {
 public:
  void pause() {
    constexpr int kYields = 200, kShortNaps = 100;  // some 100 µs, then 10 ms
    if (++polls_ <= kYields) {
      sched_yield();
    } else {
      const timespec nap{0, polls_ <= kYields + kShortNaps ? 20'000 : 200'000};
      nanosleep(&nap, nullptr);
    }
  }

 private:
  int polls_ = 0;
};

void check_host(const TensorView& t) {
  ANNULUS_CHECK(t.device == DeviceKind::cpu, "MPI communicators carry host tensors only, got {} {} of a GPU",
                name_of(t.dtype), t.shape.str());
}

void check_parts(const char* what, const TensorView& part, const TensorView& whole, int size) {
  ANNULUS_CHECK(part.dtype == whole.dtype && part.numel() * size == whole.numel(),
                "{} over {} ranks: {} {} is no part of {} {}", what, size, name_of(part.dtype), part.shape.str(),
                name_of(whole.dtype), whole.shape.str());
  check_host(part);
  check_host(whole);
}

void check_reducible(DType dtype) {
  ANNULUS_CHECK(dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64,
                "CPU ranks do not reduce {}: sum in float32", name_of(dtype));
}

void* own_part(const TensorView& whole, std::int64_t bytes, int rank) {
  return static_cast<std::byte*>(whole.data) + bytes * rank;
}

}  // namespace

void mpi_progress() {
  for (MpiCommunicator* c : live_communicators()) c->progress();
}

MpiCommunicator::MpiCommunicator(Adopt, MPI_Comm comm, MpiOptions options) : options_(options) {
  ANNULUS_CHECK(options.max_message >= 1 && options.max_message <= (std::int64_t{1} << 30),
                "messages are of 1 byte to 1 GiB, not {}", options.max_message);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  group_.comm = comm;
  group_.max_message = options.max_message;
  MPI_Comm_rank(comm, &group_.rank);
  MPI_Comm_size(comm, &group_.size);
  live_communicators().push_back(this);
}

namespace {
MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  return copy;
}
}  // namespace

MpiCommunicator::MpiCommunicator(MPI_Comm comm, MpiOptions options)
    : MpiCommunicator(Adopt{}, duplicate(comm), options) {}

MpiCommunicator::~MpiCommunicator() {
  std::erase(live_communicators(), this);
  int finalized = 0;
  MPI_Finalized(&finalized);
  // With messages in flight (an error unwinds) MPI still knows the buffers: the job is about to be aborted, so let it.
  if (!finalized && active_.empty()) MPI_Comm_free(&group_.comm);
}

int MpiCommunicator::next_tags() {
  tag_ = (tag_ + 2) % kTags;
  return tag_;
}

Handle MpiCommunicator::start(std::unique_ptr<MpiOperation> operation) {
  active_.push_back({next_id_, std::move(operation), nullptr});
  advance(active_.back());
  if (!active_.back().operation) {
    active_.pop_back();
    return {};
  }
  return {next_id_++};
}

void MpiCommunicator::advance(Active& active) noexcept {
  if (!active.operation || active.error) return;
  try {
    if (active.operation->advance()) active.operation.reset();
  } catch (...) {
    active.error = std::current_exception();
  }
}

void MpiCommunicator::progress() noexcept {
  for (Active& active : active_) advance(active);
}

Handle MpiCommunicator::all_reduce(Context& ctx, TensorView data, ReduceOp op) {
  check_host(data);
  check_reducible(data.dtype);
  if (ctx.planning || size() == 1 || data.numel() == 0) return {};
  counters_.all_reduce += all_reduce_bytes(group_, data);
  return start(make_all_reduce(group_, next_tags(), data, op, pool_));
}

Handle MpiCommunicator::all_gather(Context& ctx, TensorView send, TensorView recv) {
  check_parts("all_gather", send, recv, size());
  if (ctx.planning || send.numel() == 0) return {};
  void* own = own_part(recv, send.bytes(), rank());
  if (own != send.data) std::memcpy(own, send.data, static_cast<std::size_t>(send.bytes()));
  if (size() == 1) return {};
  counters_.all_gather += send.bytes() * (size() - 1);
  return start(make_all_gather(group_, next_tags(), recv));
}

Handle MpiCommunicator::reduce_scatter(Context& ctx, TensorView send, TensorView recv) {
  check_parts("reduce_scatter", recv, send, size());
  check_reducible(send.dtype);
  if (ctx.planning || recv.numel() == 0) return {};
  if (size() == 1) {
    if (recv.data != send.data) std::memcpy(recv.data, send.data, static_cast<std::size_t>(recv.bytes()));
    return {};
  }
  counters_.reduce_scatter += recv.bytes() * (size() - 1);
  return start(make_reduce_scatter(group_, next_tags(), send, recv, pool_));
}

Handle MpiCommunicator::shift(Context& ctx, TensorView send, TensorView recv, int distance) {
  check_host(send);
  check_host(recv);
  ANNULUS_CHECK(distance > 0 && distance < size(), "shift by {} over {} ranks", distance, size());
  ANNULUS_CHECK(send.dtype == recv.dtype && send.numel() == recv.numel(), "shift: {} {} does not fit {} {}",
                name_of(send.dtype), send.shape.str(), name_of(recv.dtype), recv.shape.str());
  if (ctx.planning) return {};
  ANNULUS_CHECK(send.numel() == 0 || send.data != recv.data, "shift: send and recv are the same buffer");
  counters_.shift += send.bytes();
  ++counters_.num_shifts;
  return start(make_shift(group_, next_tags(), send, recv, distance));
}

Handle MpiCommunicator::broadcast(Context& ctx, TensorView data, int root) {
  check_host(data);
  ANNULUS_CHECK(root >= 0 && root < size(), "root {} of {} ranks", root, size());
  if (ctx.planning || size() == 1 || data.numel() == 0) return {};
  if ((rank() + 1) % size() != root) counters_.broadcast += data.bytes();
  return start(make_broadcast(group_, next_tags(), data, root));
}

void MpiCommunicator::wait(Context& ctx, Handle handle) {
  if (ctx.planning || handle.id < 0) return;
  const auto find = [&] {
    return std::find_if(active_.begin(), active_.end(), [&](const Active& a) { return a.id == handle.id; });
  };
  ANNULUS_CHECK(find() != active_.end(), "handle {} is not in flight: waited for twice?", handle.id);
  Backoff backoff;
  Heartbeat::Waiting waiting;
  for (auto it = find();; backoff.pause()) {
    mpi_progress();
    if (it->error) std::rethrow_exception(it->error);  // stays active: its messages may still be in flight
    if (it->operation) continue;
    active_.erase(it);
    return;
  }
}

void MpiCommunicator::barrier() {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(group_.comm, &request), "MPI_Ibarrier");
  Backoff backoff;
  Heartbeat::Waiting waiting;
  for (int done = 0;; backoff.pause()) {
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test of a barrier");
    if (done) return;
    mpi_progress();
  }
}

std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key) {
  ANNULUS_CHECK(color >= 0, "split: color {} is negative", color);
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(group_.comm, color, key, &part), fmt::format("MPI_Comm_split({}, {})", color, key));
  return std::unique_ptr<Communicator>(new MpiCommunicator(Adopt{}, part, options_));
}

std::unique_ptr<MpiCommunicator> MpiCommunicator::split_by_host() {
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(group_.comm, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &part),
            "MPI_Comm_split_type");
  return std::unique_ptr<MpiCommunicator>(new MpiCommunicator(Adopt{}, part, options_));
}

}  // namespace annulus::parallel
