// Which kernel runs a banded operation: by device, type and shape.
#include "attention/cuda/band_kernels.h"
#ifdef ANNULUS_SM90A
#include "attention/cuda/sm90/backward.h"
#include "attention/cuda/sm90/forward.h"
#endif

namespace annulus::attention::cuda {

void band_forward(Context& ctx, const BandForward& args) {
  if (args.q.numel() == 0) return;
#ifdef ANNULUS_SM90A
  if (sm90::takes(ctx, args)) return sm90::band_forward(ctx, args);
#endif
  plain::band_forward(ctx, args);
}

void band_backward(Context& ctx, const BandBackward& args) {
  if (args.q.numel() == 0 || args.k.numel() == 0) return;
#ifdef ANNULUS_SM90A
  if (sm90::takes(ctx, args)) return sm90::band_backward(ctx, args);
#endif
  plain::band_backward(ctx, args);
}

}  // namespace annulus::attention::cuda
