// Keeps the support library non-empty whatever the globs find.
namespace annulus::testing {
extern const int kAnchor;
const int kAnchor = 0;
}  // namespace annulus::testing
