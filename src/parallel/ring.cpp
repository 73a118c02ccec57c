#include "parallel/ring.h"

#include <numeric>

namespace annulus::parallel {
namespace {

void check_hops(const std::vector<int>& hops, int ranks) {
  ANNULUS_CHECK(!hops.empty() && hops[0] == 0, "a ring starts at home: hop 0 comes first");
  for (std::size_t i = 1; i < hops.size(); ++i) {
    ANNULUS_CHECK(hops[i] > hops[i - 1], "hops ascend: {} after {}", hops[i], hops[i - 1]);
  }
  ANNULUS_CHECK(hops.back() < ranks, "hop {} on a ring of {} ranks", hops.back(), ranks);
}

void check_like(const char* what, const TensorView& tensor, const TensorView& model, bool used) {
  ANNULUS_CHECK(!used || (tensor.dtype == model.dtype && tensor.numel() == model.numel()),
                "ring: {} {} {} is not like {} {}", what, name_of(tensor.dtype), tensor.shape.str(),
                name_of(model.dtype), model.shape.str());
}

// The walk of K and V, the same in both directions: at hop i the buffer at hand, with the next one on its way.
class Walk {
 public:
  Walk(Context& ctx, Communicator& ring, const std::vector<int>& hops, const TensorView& own,
       const TensorView (&visiting)[2])
      : ctx_(ctx), ring_(ring), hops_(hops), own_(own), visiting_(visiting) {
    check_hops(hops, ring.size());
    check_like("visiting[0]", visiting[0], own, hops.size() > 1);
    check_like("visiting[1]", visiting[1], own, hops.size() > 2);
  }

  int source(std::size_t i) const { return (ring_.rank() - hops_[i] + ring_.size()) % ring_.size(); }
  const TensorView& buffer(std::size_t i) const { return i == 0 ? own_ : visiting_[(i - 1) % 2]; }

  // Sends the buffer at hand on, into the one that was at hand before: its own sending ended with arrive(), its reading
  // is ahead of this on the stream.
  void depart(std::size_t i) {
    ctx_.at_hop(hops_[i]);
    next_ = {};
    if (i + 1 < hops_.size()) next_ = ring_.shift(ctx_, buffer(i), visiting_[i % 2], hops_[i + 1] - hops_[i]);
  }
  void arrive() { ring_.wait(ctx_, next_); }

 private:
  Context& ctx_;
  Communicator& ring_;
  const std::vector<int>& hops_;
  const TensorView& own_;
  const TensorView (&visiting_)[2];
  Handle next_;
};

}  // namespace

std::vector<int> all_hops(int ranks) {
  std::vector<int> hops(static_cast<std::size_t>(ranks));
  std::iota(hops.begin(), hops.end(), 0);
  return hops;
}

void ring_forward(Context& ctx, const RingForward& args, const RingVisit& visit) {
  Walk walk(ctx, args.ring, args.hops, args.own, args.visiting);
  for (std::size_t i = 0; i < args.hops.size(); ++i) {
    walk.depart(i);
    visit(walk.source(i), walk.buffer(i), i + 1 == args.hops.size());
    walk.arrive();
  }
}

void ring_backward(Context& ctx, const RingBackward& args, const RingGradientVisit& visit) {
  const std::vector<int>& hops = args.hops;
  Walk walk(ctx, args.ring, hops, args.own, args.visiting);
  Communicator& gradients = args.gradient_ring;
  ANNULUS_CHECK(gradients.rank() == args.ring.rank() && gradients.size() == args.ring.size(),
                "the rings of buffers and of gradients differ");
  ANNULUS_CHECK(hops.size() == 1 || &gradients != &args.ring, "gradients travel on a communicator of their own");
  check_like("partial", args.partial, args.own_gradient, hops.size() > 1);
  check_like("travelling[0]", args.travelling[0], args.own_gradient, hops.size() > 1);
  check_like("travelling[1]", args.travelling[1], args.own_gradient, hops.size() > 2);

  Handle travelling;
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const bool last = i + 1 == hops.size();
    const TensorView& partial = i == 0 ? args.own_gradient : args.partial;
    args.zero(ctx, partial);
    walk.depart(i);
    visit(walk.source(i), walk.buffer(i), partial);
    const TensorView& sum = i == 0 ? args.own_gradient : args.travelling[(i - 1) % 2];
    if (i > 0) {
      gradients.wait(ctx, travelling);  // the source's sum so far; also frees the buffer that is received into below
      args.accumulate(ctx, partial, sum);
    }
    if (hops.size() > 1) {  // after the last hop: home, into own_gradient, whose content left with the first
      const int distance = last ? gradients.size() - hops[i] : hops[i + 1] - hops[i];
      travelling = gradients.shift(ctx, sum, last ? args.own_gradient : args.travelling[i % 2], distance);
    }
    walk.arrive();
  }
  gradients.wait(ctx, travelling);
}

}  // namespace annulus::parallel
