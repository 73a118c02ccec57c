#include "parallel/mpi_operations.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

namespace annulus::parallel {
namespace {

constexpr std::int64_t kDepth = 4;                   // messages in flight each way
constexpr std::int64_t kReducePiece = 256 << 10;     // bytes; what is staged stays in a core's cache until it is added
constexpr std::int64_t kGatherPiece = 4 << 20;       // bytes; small enough to forward early
constexpr std::int64_t kShortAllReduce = 256 << 10;  // bytes over all ranks

int mod(std::int64_t a, int n) { return static_cast<int>(((a % n) + n) % n); }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t piece_elements(const MpiGroup& group, std::int64_t bytes, DType dtype) {
  return std::max<std::int64_t>(1, std::min(bytes, group.max_message) / static_cast<std::int64_t>(size_of(dtype)));
}

template <class T, class F>
void combine_with(T* out, const T* a, const T* b, std::int64_t count, F f) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) out[i] = f(a[i], b[i]);
}

template <class T>
void combine_as(ReduceOp op, void* out, const void* a, const void* b, std::int64_t count) {
  auto* o = static_cast<T*>(out);
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
  switch (op) {
    case ReduceOp::sum:
      if constexpr (std::is_integral_v<T>) {  // wraps, as the hardware does
        using U = std::make_unsigned_t<T>;
        combine_with(o, x, y, count, [](T p, T q) { return static_cast<T>(static_cast<U>(p) + static_cast<U>(q)); });
      } else {
        combine_with(o, x, y, count, [](T p, T q) { return p + q; });
      }
      return;
    case ReduceOp::min:
      combine_with(o, x, y, count, [](T p, T q) { return q < p || q != q ? q : p; });
      return;
    case ReduceOp::max:
      combine_with(o, x, y, count, [](T p, T q) { return q > p || q != q ? q : p; });
      return;
  }
}

struct Message {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// A stream of messages to one peer and a stream from another, both in order, a few in flight. Subclasses say what the
// messages are and which depend on which.
class Pipeline : public MpiOperation {
 public:
  bool advance() final {
    for (bool moved = true; moved;) {
      moved = false;
      while (recv_posted_ < num_recvs_ && recv_posted_ - recv_done_ < kDepth && send_done_ > needs_send(recv_posted_)) {
        post_recv();
      }
      while (send_posted_ < num_sends_ && send_posted_ - send_done_ < kDepth && recv_done_ > needs_recv(send_posted_)) {
        post_send();
      }
      if (recv_done_ < recv_posted_ && recv_finished()) {
        arrived(recv_done_++);
        moved = true;
      }
      if (send_done_ < send_posted_ && send_finished()) {
        ++send_done_;
        moved = true;
      }
    }
    return recv_done_ == num_recvs_ && send_done_ == num_sends_;
  }

 protected:
  Pipeline(const MpiGroup& group, int tag, int to, int from) : group_(group), tag_(tag), to_(to), from_(from) {}

  virtual Message outgoing(std::int64_t index) = 0;
  virtual Message incoming(std::int64_t index) = 0;
  virtual std::int64_t needs_recv(std::int64_t) const { return -1; }  // the receive that feeds this send, or −1
  virtual std::int64_t needs_send(std::int64_t) const { return -1; }  // the send that frees this receive's place, or −1
  virtual void arrived(std::int64_t) {}

  const MpiGroup group_;
  std::int64_t num_sends_ = 0, num_recvs_ = 0;

 private:
  static std::size_t place(std::int64_t index) { return static_cast<std::size_t>(index % kDepth); }

  void post_recv() {
    const Message m = incoming(recv_posted_);
    check_mpi(
        MPI_Irecv(m.data, static_cast<int>(m.bytes), MPI_BYTE, from_, tag_, group_.comm, &recvs_[place(recv_posted_)]),
        fmt::format("MPI_Irecv of {} bytes from rank {}", m.bytes, from_));
    recv_bytes_[place(recv_posted_++)] = m.bytes;
  }

  void post_send() {
    const Message m = outgoing(send_posted_);
    check_mpi(
        MPI_Isend(m.data, static_cast<int>(m.bytes), MPI_BYTE, to_, tag_, group_.comm, &sends_[place(send_posted_)]),
        fmt::format("MPI_Isend of {} bytes to rank {}", m.bytes, to_));
    ++send_posted_;
  }

  bool recv_finished() {
    const std::int64_t expected = recv_bytes_[place(recv_done_)];
    int done = 0, count = 0;
    MPI_Status status;
    const int result = MPI_Test(&recvs_[place(recv_done_)], &done, &status);
    if (result != MPI_SUCCESS) {
      check_mpi(result, fmt::format("MPI_Test: rank {} expected {} bytes from rank {}; ranks disagree on sizes?",
                                    group_.rank, expected, from_));
    }
    if (!done) return false;
    MPI_Get_count(&status, MPI_BYTE, &count);
    ANNULUS_CHECK(count == expected, "rank {} expected {} bytes from rank {} and got {}: the ranks disagree on sizes",
                  group_.rank, expected, from_, count);
    return true;
  }

  bool send_finished() {
    int done = 0;
    const int result = MPI_Test(&sends_[place(send_done_)], &done, MPI_STATUS_IGNORE);
    if (result != MPI_SUCCESS) check_mpi(result, fmt::format("MPI_Test of a send to rank {}", to_));
    return done != 0;
  }

  int tag_, to_, from_;
  std::int64_t recv_posted_ = 0, recv_done_ = 0, send_posted_ = 0, send_done_ = 0;
  std::array<MPI_Request, kDepth> recvs_{}, sends_{};
  std::array<std::int64_t, kDepth> recv_bytes_{};
};

Message piece_of(const TensorView& tensor, std::int64_t index, std::int64_t elements) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t begin = index * elements;
  return {static_cast<std::byte*>(tensor.data) + begin * size, std::min(elements, tensor.numel() - begin) * size};
}

class Shift final : public Pipeline {
 public:
  Shift(const MpiGroup& group, int tag, const TensorView& send, const TensorView& recv, int distance)
      : Pipeline(group, tag, mod(group.rank + distance, group.size), mod(group.rank - distance, group.size)),
        send_(send),
        recv_(recv),
        piece_(piece_elements(group, group.max_message, send.dtype)) {
    num_sends_ = num_recvs_ = ceil_div(send.numel(), piece_);
  }

 private:
  Message outgoing(std::int64_t index) override { return piece_of(send_, index, piece_); }
  Message incoming(std::int64_t index) override { return piece_of(recv_, index, piece_); }

  TensorView send_, recv_;
  std::int64_t piece_;
};

// A chain from the root; each rank passes pieces on while later ones arrive.
class Broadcast final : public Pipeline {
 public:
  Broadcast(const MpiGroup& group, int tag, const TensorView& data, int root)
      : Pipeline(group, tag, mod(group.rank + 1, group.size), mod(group.rank - 1, group.size)),
        data_(data),
        piece_(piece_elements(group, kGatherPiece, data.dtype)),
        is_root_(group.rank == root) {
    const std::int64_t pieces = ceil_div(data.numel(), piece_);
    num_recvs_ = is_root_ ? 0 : pieces;
    num_sends_ = mod(group.rank + 1, group.size) == root ? 0 : pieces;
  }

 private:
  Message outgoing(std::int64_t index) override { return piece_of(data_, index, piece_); }
  Message incoming(std::int64_t index) override { return piece_of(data_, index, piece_); }
  std::int64_t needs_recv(std::int64_t index) const override { return is_root_ ? -1 : index; }

  TensorView data_;
  std::int64_t piece_;
  bool is_root_;
};

// A flat tensor as `size` parts of n elements, the last ones possibly short, each in pieces.
struct Parts {
  Parts(const MpiGroup& group, const TensorView& tensor, std::int64_t piece_bytes)
      : data(static_cast<std::byte*>(tensor.data)),
        element(static_cast<std::int64_t>(size_of(tensor.dtype))),
        total(tensor.numel()),
        part(std::max<std::int64_t>(1, ceil_div(total, group.size))),
        piece(piece_elements(group, piece_bytes, tensor.dtype)),
        pieces(total ? ceil_div(part, piece) : 0) {}

  Message message(int part_index, std::int64_t piece_index) const {
    const std::int64_t begin = std::min(part_index * part + piece_index * piece, total);
    const std::int64_t end = std::min({begin + piece, (part_index + 1) * part, total});
    return {data + begin * element, std::max<std::int64_t>(0, end - begin) * element};
  }
  std::int64_t bytes(int part_index) const {
    return (std::min((part_index + 1) * part, total) - std::min(part_index * part, total)) * element;
  }

  std::byte* data;
  std::int64_t element, total, part, piece, pieces;
};

// Both halves of the ring all-reduce: size − 1 rounds, each piece of a part goes on when it has arrived (and been
// added). Messages run block by block (kDepth pieces), in a block round by round, so that a piece's next round follows
// kDepth messages later and other pieces are in flight in between.
class RingRounds : public Pipeline {
 protected:
  struct Item {
    std::int64_t piece;
    std::int64_t round;
    std::int64_t stride;  // messages from one round of a piece to its next
  };

  RingRounds(const MpiGroup& group, int tag, const Parts& parts)
      : Pipeline(group, tag, mod(group.rank + 1, group.size), mod(group.rank - 1, group.size)),
        parts_(parts),
        rounds_(group.size - 1) {
    num_sends_ = num_recvs_ = parts.pieces * rounds_;
  }

  Item item(std::int64_t index) const {
    const std::int64_t block = index / (kDepth * rounds_), offset = index % (kDepth * rounds_);
    const std::int64_t width = std::min(kDepth, parts_.pieces - block * kDepth);
    return {block * kDepth + offset % width, offset / width, width};
  }
  std::int64_t needs_recv(std::int64_t index) const override {
    const Item i = item(index);
    return i.round == 0 ? -1 : index - i.stride;
  }

  Parts parts_;
  int rounds_;
};

class AllGather final : public RingRounds {
 public:
  AllGather(const MpiGroup& group, int tag, const TensorView& recv)
      : RingRounds(group, tag, Parts(group, recv, kGatherPiece)) {}

 private:
  Message part(std::int64_t index, int behind) {
    const Item i = item(index);
    return parts_.message(mod(group_.rank - i.round - behind, group_.size), i.piece);
  }
  Message outgoing(std::int64_t index) override { return part(index, 0); }
  Message incoming(std::int64_t index) override { return part(index, 1); }
};

class ReduceScatter final : public RingRounds {
 public:
  // result: where this rank's part of the reduction goes.
  ReduceScatter(const MpiGroup& group, int tag, const TensorView& send, void* result, ReduceOp op, StagingPool& pool)
      : RingRounds(group, tag, Parts(group, send, kReducePiece)),
        result_(static_cast<std::byte*>(result)),
        op_(op),
        dtype_(send.dtype),
        pool_(pool) {
    if (!pool_.empty()) {
      staging_ = std::move(pool_.back());
      pool_.pop_back();
    }
    const auto needed = static_cast<std::size_t>(2 * kDepth * parts_.piece * parts_.element);
    if (staging_.size() < needed) staging_.resize(needed);
  }
  ~ReduceScatter() override { pool_.push_back(std::move(staging_)); }

 private:
  Message own(std::int64_t index, int behind) const {  // this rank's share of a message's part
    const Item i = item(index);
    return parts_.message(mod(group_.rank - i.round - behind, group_.size), i.piece);
  }
  std::byte* slot(std::int64_t index) {
    return staging_.data() + (index % (2 * kDepth)) * parts_.piece * parts_.element;
  }

  Message outgoing(std::int64_t index) override {
    Message m = own(index, 1);
    if (const std::int64_t source = needs_recv(index); source >= 0) m.data = slot(source);
    return m;
  }
  Message incoming(std::int64_t index) override { return {slot(index), own(index, 2).bytes}; }

  // A slot is free again when what was in it has been sent on; the last round's was used up on arrival.
  std::int64_t needs_send(std::int64_t index) const override {
    const std::int64_t previous = index - 2 * kDepth;
    if (previous < 0) return -1;
    const Item i = item(previous);
    return i.round == rounds_ - 1 ? -1 : previous + i.stride;
  }

  void arrived(std::int64_t index) override {
    const Item i = item(index);
    const Message mine = own(index, 2);
    void* out = i.round == rounds_ - 1 ? result_ + i.piece * parts_.piece * parts_.element : slot(index);
    combine(op_, dtype_, out, slot(index), mine.data, mine.bytes / parts_.element);
  }

  std::byte* result_;
  ReduceOp op_;
  DType dtype_;
  StagingPool& pool_;
  std::vector<std::byte> staging_;
};

class LongAllReduce final : public MpiOperation {
 public:
  LongAllReduce(const MpiGroup& group, int tag, const TensorView& data, ReduceOp op, StagingPool& pool)
      : reduce_(group, tag, data, Parts(group, data, kReducePiece).message(group.rank, 0).data, op, pool),
        gather_(group, tag + 1, data) {}
  bool advance() override {
    if (!reduced_) reduced_ = reduce_.advance();
    return reduced_ && gather_.advance();
  }

 private:
  ReduceScatter reduce_;
  AllGather gather_;
  bool reduced_ = false;
};

// One round, everybody to everybody: the latency of one message, and one order of additions on every rank.
class ShortAllReduce final : public MpiOperation {
 public:
  ShortAllReduce(const MpiGroup& group, int tag, const TensorView& data, ReduceOp op, StagingPool& pool)
      : group_(group), data_(data), op_(op), pool_(pool), requests_(static_cast<std::size_t>(2 * (group.size - 1))) {
    if (!pool_.empty()) {
      staging_ = std::move(pool_.back());
      pool_.pop_back();
    }
    const auto bytes = static_cast<std::size_t>(data.bytes());
    if (staging_.size() < bytes * static_cast<std::size_t>(group.size)) {
      staging_.resize(bytes * static_cast<std::size_t>(group.size));
    }
    std::memcpy(part(group.rank), data.data, bytes);
    const int count = static_cast<int>(data.bytes());
    for (int i = 1; i < group.size; ++i) {
      const int from = mod(group.rank - i, group.size), to = mod(group.rank + i, group.size);
      const auto at = static_cast<std::size_t>(2 * (i - 1));
      check_mpi(MPI_Irecv(part(from), count, MPI_BYTE, from, tag, group.comm, &requests_[at]),
                fmt::format("MPI_Irecv of {} bytes from rank {}", count, from));
      check_mpi(MPI_Isend(part(group.rank), count, MPI_BYTE, to, tag, group.comm, &requests_[at + 1]),
                fmt::format("MPI_Isend of {} bytes to rank {}", count, to));
    }
  }
  ~ShortAllReduce() override { pool_.push_back(std::move(staging_)); }

  bool advance() override {
    for (; next_ < requests_.size(); ++next_) {
      const bool is_recv = next_ % 2 == 0;
      const int from = mod(group_.rank - 1 - static_cast<std::int64_t>(next_ / 2), group_.size);
      int done = 0, count = 0;
      MPI_Status status;
      const int result = MPI_Test(&requests_[next_], &done, &status);
      if (result != MPI_SUCCESS) {
        check_mpi(result, fmt::format("MPI_Test: rank {} expected {} bytes from rank {}; ranks disagree on sizes?",
                                      group_.rank, data_.bytes(), from));
      }
      if (!done) return false;
      if (is_recv) MPI_Get_count(&status, MPI_BYTE, &count);
      ANNULUS_CHECK(!is_recv || count == data_.bytes(),
                    "rank {} expected {} bytes from rank {} and got {}: the ranks disagree on sizes", group_.rank,
                    data_.bytes(), from, count);
    }
    std::memcpy(data_.data, part(0), static_cast<std::size_t>(data_.bytes()));
    for (int r = 1; r < group_.size; ++r) combine(op_, data_.dtype, data_.data, data_.data, part(r), data_.numel());
    return true;
  }

 private:
  std::byte* part(int r) { return staging_.data() + r * data_.bytes(); }

  MpiGroup group_;
  TensorView data_;
  ReduceOp op_;
  StagingPool& pool_;
  std::vector<std::byte> staging_;
  std::vector<MPI_Request> requests_;
  std::size_t next_ = 0;
};

bool is_short(const MpiGroup& group, const TensorView& data) {
  return data.bytes() * group.size <= kShortAllReduce && data.bytes() <= group.max_message;
}

}  // namespace

void check_mpi(int result, const std::string& call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(fmt::format("{}: {}", call, text));
}

void combine(ReduceOp op, DType dtype, void* out, const void* a, const void* b, std::int64_t count) {
  switch (dtype) {
    case DType::f32:
      return combine_as<float>(op, out, a, b, count);
    case DType::f64:
      return combine_as<double>(op, out, a, b, count);
    case DType::i32:
      return combine_as<std::int32_t>(op, out, a, b, count);
    case DType::i64:
      return combine_as<std::int64_t>(op, out, a, b, count);
    default:
      break;
  }
  ANNULUS_CHECK(false, "CPU ranks do not reduce {}: sum in float32", name_of(dtype));
}

std::unique_ptr<MpiOperation> make_shift(const MpiGroup& group, int tag, const TensorView& send, const TensorView& recv,
                                         int distance) {
  return std::make_unique<Shift>(group, tag, send, recv, distance);
}

std::unique_ptr<MpiOperation> make_broadcast(const MpiGroup& group, int tag, const TensorView& data, int root) {
  return std::make_unique<Broadcast>(group, tag, data, root);
}

std::unique_ptr<MpiOperation> make_all_gather(const MpiGroup& group, int tag, const TensorView& recv) {
  return std::make_unique<AllGather>(group, tag, recv);
}

std::unique_ptr<MpiOperation> make_reduce_scatter(const MpiGroup& group, int tag, const TensorView& send,
                                                  const TensorView& recv, StagingPool& pool) {
  return std::make_unique<ReduceScatter>(group, tag, send, recv.data, ReduceOp::sum, pool);
}

std::unique_ptr<MpiOperation> make_all_reduce(const MpiGroup& group, int tag, const TensorView& data, ReduceOp op,
                                              StagingPool& pool) {
  if (is_short(group, data)) return std::make_unique<ShortAllReduce>(group, tag, data, op, pool);
  return std::make_unique<LongAllReduce>(group, tag, data, op, pool);
}

std::int64_t all_reduce_bytes(const MpiGroup& group, const TensorView& data) {
  if (is_short(group, data)) return data.bytes() * (group.size - 1);
  const Parts parts(group, data, kReducePiece);
  return 2 * data.bytes() - parts.bytes(group.rank) - parts.bytes(mod(group.rank + 1, group.size));
}

}  // namespace annulus::parallel
