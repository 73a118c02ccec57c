// Workspaces: scratch memory that an operation takes from ctx.scratch while it runs. workspace_bytes() of a device says
// how much from shapes and dtypes alone, is host code that every build has, and is 0 for operations without an
// overload: so a dry run (ctx.planning) counts the same bytes, also for a device that this machine lacks. A twin takes
// its memory through Workspace, which gives it back at the end of the scope.
#pragma once

#include "ops/ops.h"

namespace annulus::ops {

namespace cpu {
template <class Args>
constexpr std::int64_t workspace_bytes(const Args&) {
  return 0;
}
std::int64_t workspace_bytes(const RmsNormBackward& args);
std::int64_t workspace_bytes(const AddBiasBackward& args);
}  // namespace cpu

namespace cuda {  // host arithmetic only: overloads go here and into workspace.cpp
template <class Args>
constexpr std::int64_t workspace_bytes(const Args&) {
  return 0;
}
}  // namespace cuda

class Workspace {  // throws Error where bytes are needed and the context has no scratch arena
 public:
  Workspace(Context& ctx, const char* name, std::int64_t bytes);

  template <class T>
  T* as() const {
    return static_cast<T*>(view_.data);
  }

 private:
  static Arena& scratch_of(Context& ctx, const char* name);
  Arena::Scope scope_;
  TensorView view_;
};

}  // namespace annulus::ops
