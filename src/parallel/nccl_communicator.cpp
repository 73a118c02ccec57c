#include "parallel/nccl_communicator.h"

#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>

#include "core/cuda/device.h"

namespace annulus::parallel {
namespace {

void check_nccl(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) {
  if (result == ncclSuccess) return;
  const char* detail = ncclGetLastError(comm);
  throw Error(fmt::format("NCCL: {}: {}{}{}", call, ncclGetErrorString(result), detail && *detail ? ": " : "",
                          detail ? detail : ""));
}
#define ANNULUS_NCCL_TRY(call) check_nccl((call), #call, comm_)

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
      return ncclUint8;
    case DType::f16:
      return ncclFloat16;
  }
  return ncclUint8;
}

ncclRedOp_t nccl_op(ReduceOp op, DType dtype) {
  if (op == ReduceOp::sum) return ncclSum;
  ANNULUS_CHECK(dtype == DType::i32 || dtype == DType::i64 || dtype == DType::u8,
                "NCCL's min and max drop NaN: reduce {} on the host", name_of(dtype));
  return op == ReduceOp::min ? ncclMin : ncclMax;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const ComputeDevice& device, Communicator& host, NcclOptions options,
                   std::unique_ptr<Communicator> owned_host = nullptr);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Handle all_reduce(Context& ctx, TensorView data, ReduceOp op) override;
  Handle all_gather(Context& ctx, TensorView send, TensorView recv) override;
  Handle reduce_scatter(Context& ctx, TensorView send, TensorView recv) override;
  Handle shift(Context& ctx, TensorView send, TensorView recv, int distance) override;
  Handle broadcast(Context& ctx, TensorView data, int root) override;
  void wait(Context& ctx, Handle handle) override;
  void barrier() override { host_->barrier(); }
  std::unique_ptr<Communicator> split(int color, int key) override;

 private:
  struct Slot {  // of a handle: id mod kMaxInFlight
    cudaEvent_t ready = nullptr, done = nullptr;
    std::int64_t id = -1;  // in flight, not waited for yet
  };

  void make_communicator();
  void check_tensor(const Context& ctx, const TensorView& t) const;
  void check_parts(const Context& ctx, const char* what, const TensorView& part, const TensorView& whole) const;
  Handle copy_alone(Context& ctx, const TensorView& from, const TensorView& to) const;
  template <class Launch>  // launch(first element, count) of one piece
  Handle start(Context& ctx, std::int64_t elements, DType dtype, const Launch& launch);

  ComputeDevice device_;
  Communicator* host_;
  NcclOptions options_;
  std::unique_ptr<Communicator> owned_host_;
  int rank_, size_, exceptions_;
  ncclComm_t comm_ = nullptr;  // null for one rank
  cudaStream_t stream_ = nullptr;
  std::array<Slot, kMaxInFlight> slots_;
  std::int64_t next_id_ = 0;
};

std::byte* at(const TensorView& t, std::int64_t element) {
  return static_cast<std::byte*>(t.data) + element * static_cast<std::int64_t>(size_of(t.dtype));
}

NcclCommunicator::NcclCommunicator(const ComputeDevice& device, Communicator& host, NcclOptions options,
                                   std::unique_ptr<Communicator> owned_host)
    : device_(device),
      host_(&host),
      options_(options),
      owned_host_(std::move(owned_host)),
      rank_(host.rank()),
      size_(host.size()),
      exceptions_(std::uncaught_exceptions()) {
  ANNULUS_CHECK(device.kind == DeviceKind::cuda, "an NCCL communicator needs a GPU");
  ANNULUS_CHECK(options.max_message >= 8, "messages are of 8 bytes or more, not {}", options.max_message);
  if (size_ > 1) make_communicator();
}

void NcclCommunicator::make_communicator() {
  ncclUniqueId id{};
  if (rank_ == 0) ANNULUS_NCCL_TRY(ncclGetUniqueId(&id));
  Context host_ctx;
  host_->wait(host_ctx, host_->broadcast(host_ctx, host_view(reinterpret_cast<std::uint8_t*>(&id), {sizeof id}), 0));
  ANNULUS_CUDA_TRY(cudaSetDevice(device_.cuda->index));
  int least = 0, greatest = 0;  // a transfer's few blocks go ahead of a waiting kernel's many
  ANNULUS_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  ANNULUS_CUDA_TRY(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  for (Slot& slot : slots_) {
    ANNULUS_CUDA_TRY(cudaEventCreateWithFlags(&slot.ready, cudaEventDisableTiming));
    ANNULUS_CUDA_TRY(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
  }
  ANNULUS_NCCL_TRY(ncclCommInitRank(&comm_, size_, id, rank_));
}

NcclCommunicator::~NcclCommunicator() {
  cudaSetDevice(device_.cuda->index);
  if (comm_) {
    if (std::uncaught_exceptions() > exceptions_) {
      ncclCommAbort(comm_);  // a peer may be gone: do not wait for it
    } else {
      cudaStreamSynchronize(stream_);
      ncclCommDestroy(comm_);
    }
  }
  for (Slot& slot : slots_) {
    if (slot.ready) cudaEventDestroy(slot.ready);
    if (slot.done) cudaEventDestroy(slot.done);
  }
  if (stream_) cudaStreamDestroy(stream_);
}

void NcclCommunicator::check_tensor(const Context& ctx, const TensorView& t) const {
  ANNULUS_CHECK(t.device == DeviceKind::cuda, "NCCL communicators carry tensors of a GPU only, got {} {} of the host",
                name_of(t.dtype), t.shape.str());
  ANNULUS_CHECK(ctx.planning || ctx.cuda == device_.cuda.get(),
                "the Context is on another device than the communicator");
}

void NcclCommunicator::check_parts(const Context& ctx, const char* what, const TensorView& part,
                                   const TensorView& whole) const {
  ANNULUS_CHECK(part.dtype == whole.dtype && part.numel() * size_ == whole.numel(),
                "{} over {} ranks: {} {} is no part of {} {}", what, size_, name_of(part.dtype), part.shape.str(),
                name_of(whole.dtype), whole.shape.str());
  check_tensor(ctx, part);
  check_tensor(ctx, whole);
}

// Ready event, launches on the own stream in pieces, done event. Pieces are the same on every rank.
template <class Launch>
Handle NcclCommunicator::start(Context& ctx, std::int64_t elements, DType dtype, const Launch& launch) {
  Slot& slot = slots_[static_cast<std::size_t>(next_id_ % kMaxInFlight)];
  ANNULUS_CHECK(slot.id < 0, "{} transfers are in flight: handle {} was never waited for", kMaxInFlight, slot.id);
  ANNULUS_CUDA_TRY(cudaEventRecord(slot.ready, ctx.cuda->stream));
  ANNULUS_CUDA_TRY(cudaStreamWaitEvent(stream_, slot.ready, 0));
  const std::int64_t piece = options_.max_message / static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t begin = 0; begin < elements; begin += piece) {
    launch(begin, static_cast<std::size_t>(std::min(piece, elements - begin)));
  }
  ANNULUS_CUDA_TRY(cudaEventRecord(slot.done, stream_));
  slot.id = next_id_;
  return {next_id_++};
}

void NcclCommunicator::wait(Context& ctx, Handle handle) {
  if (ctx.planning || handle.id < 0) return;
  Slot& slot = slots_[static_cast<std::size_t>(handle.id % kMaxInFlight)];
  ANNULUS_CHECK(slot.id == handle.id, "handle {} is not in flight: waited for twice?", handle.id);
  slot.id = -1;
  ANNULUS_CUDA_TRY(cudaStreamWaitEvent(ctx.cuda->stream, slot.done, 0));
}

Handle NcclCommunicator::copy_alone(Context& ctx, const TensorView& from, const TensorView& to) const {
  if (from.data != to.data) copy(ctx, from, to);
  return {};
}

Handle NcclCommunicator::all_reduce(Context& ctx, TensorView data, ReduceOp op) {
  check_tensor(ctx, data);
  const ncclRedOp_t reduction = nccl_op(op, data.dtype);
  if (ctx.planning || size_ == 1 || data.numel() == 0) return {};
  counters_.all_reduce += 2 * (data.bytes() / size_) * (size_ - 1);  // a ring's share
  return start(ctx, data.numel(), data.dtype, [&](std::int64_t begin, std::size_t count) {
    std::byte* part = at(data, begin);
    ANNULUS_NCCL_TRY(ncclAllReduce(part, part, count, nccl_type(data.dtype), reduction, comm_, stream_));
  });
}

Handle NcclCommunicator::all_gather(Context& ctx, TensorView send, TensorView recv) {
  check_parts(ctx, "all_gather", send, recv);
  if (ctx.planning || send.numel() == 0) return {};
  const std::int64_t n = send.numel();
  const ncclDataType_t type = nccl_type(send.dtype);
  if (size_ == 1) return copy_alone(ctx, send, recv);
  counters_.all_gather += send.bytes() * (size_ - 1);
  return start(ctx, n, send.dtype, [&](std::int64_t begin, std::size_t count) {
    if (begin == 0 && static_cast<std::int64_t>(count) == n) {
      ANNULUS_NCCL_TRY(ncclAllGather(send.data, recv.data, count, type, comm_, stream_));
      return;
    }
    ANNULUS_NCCL_TRY(ncclGroupStart());  // a piece of every rank's part: they do not lie side by side
    for (int root = 0; root < size_; ++root) {
      ANNULUS_NCCL_TRY(ncclBroadcast(at(send, begin), at(recv, root * n + begin), count, type, root, comm_, stream_));
    }
    ANNULUS_NCCL_TRY(ncclGroupEnd());
  });
}

Handle NcclCommunicator::reduce_scatter(Context& ctx, TensorView send, TensorView recv) {
  check_parts(ctx, "reduce_scatter", recv, send);
  if (ctx.planning || recv.numel() == 0) return {};
  const std::int64_t n = recv.numel();
  const ncclDataType_t type = nccl_type(send.dtype);
  if (size_ == 1) return copy_alone(ctx, send, recv);
  counters_.reduce_scatter += recv.bytes() * (size_ - 1);
  return start(ctx, n, send.dtype, [&](std::int64_t begin, std::size_t count) {
    if (begin == 0 && static_cast<std::int64_t>(count) == n) {
      ANNULUS_NCCL_TRY(ncclReduceScatter(send.data, recv.data, count, type, ncclSum, comm_, stream_));
      return;
    }
    ANNULUS_NCCL_TRY(ncclGroupStart());
    for (int root = 0; root < size_; ++root) {
      ANNULUS_NCCL_TRY(
          ncclReduce(at(send, root * n + begin), at(recv, begin), count, type, ncclSum, root, comm_, stream_));
    }
    ANNULUS_NCCL_TRY(ncclGroupEnd());
  });
}

Handle NcclCommunicator::shift(Context& ctx, TensorView send, TensorView recv, int distance) {
  check_tensor(ctx, send);
  check_tensor(ctx, recv);
  ANNULUS_CHECK(distance > 0 && distance < size_, "shift by {} over {} ranks", distance, size_);
  ANNULUS_CHECK(send.dtype == recv.dtype && send.numel() == recv.numel(), "shift: {} {} does not fit {} {}",
                name_of(send.dtype), send.shape.str(), name_of(recv.dtype), recv.shape.str());
  if (ctx.planning || send.numel() == 0) return {};
  ANNULUS_CHECK(send.data != recv.data, "shift: send and recv are the same buffer");
  counters_.shift += send.bytes();
  ++counters_.num_shifts;
  const int to = (rank_ + distance) % size_, from = (rank_ - distance + size_) % size_;
  const ncclDataType_t type = nccl_type(send.dtype);
  return start(ctx, send.numel(), send.dtype, [&](std::int64_t begin, std::size_t count) {
    ANNULUS_NCCL_TRY(ncclGroupStart());
    ANNULUS_NCCL_TRY(ncclSend(at(send, begin), count, type, to, comm_, stream_));
    ANNULUS_NCCL_TRY(ncclRecv(at(recv, begin), count, type, from, comm_, stream_));
    ANNULUS_NCCL_TRY(ncclGroupEnd());
  });
}

Handle NcclCommunicator::broadcast(Context& ctx, TensorView data, int root) {
  check_tensor(ctx, data);
  ANNULUS_CHECK(root >= 0 && root < size_, "root {} of {} ranks", root, size_);
  if (ctx.planning || size_ == 1 || data.numel() == 0) return {};
  if ((rank_ + 1) % size_ != root) counters_.broadcast += data.bytes();  // a chain's last rank sends nothing
  return start(ctx, data.numel(), data.dtype, [&](std::int64_t begin, std::size_t count) {
    std::byte* part = at(data, begin);
    ANNULUS_NCCL_TRY(ncclBroadcast(part, part, count, nccl_type(data.dtype), root, comm_, stream_));
  });
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  std::unique_ptr<Communicator> part = host_->split(color, key);
  Communicator& ranks = *part;
  return std::make_unique<NcclCommunicator>(device_, ranks, options_, std::move(part));
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const ComputeDevice& device,
                                                     NcclOptions options) {
  return std::make_unique<NcclCommunicator>(device, host, options);
}

}  // namespace annulus::parallel
