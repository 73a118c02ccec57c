// Counts what this program asks of operator new; a file of its own, so that the compiler does not pair malloc with
// delete.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::int64_t> asked{0};
}

namespace annulus::testing {
std::int64_t heap_bytes();
std::int64_t heap_bytes() { return asked; }
}  // namespace annulus::testing

void* operator new(std::size_t size) {
  asked += static_cast<std::int64_t>(size);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
