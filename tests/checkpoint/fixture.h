// A small model with optimiser state, cut into slices for any number of ranks, and folders that vanish.
#pragma once

#include <gtest/gtest.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save.h"
#include "checkpoint/store.h"
#include "core/rng.h"

namespace annulus::checkpoint::testing {

// In memory where there is room, since every save waits for several fsyncs.
class TempFolder {
 public:
  TempFolder() {
    struct statvfs info;
    const bool memory = statvfs("/dev/shm", &info) == 0 && info.f_bavail * info.f_frsize > (256u << 20) &&
                        access("/dev/shm", W_OK) == 0;
    std::string pattern = (memory ? "/dev/shm/" : ::testing::TempDir()) + "annulus-checkpoint-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct Tensor {
  std::string group, name;
  Shape shape;
  DType dtype;
};

// Odd sizes; one tensor smaller than a rank's share, one of a single row, one of a single column.
inline std::vector<Tensor> small_model() {
  std::vector<Tensor> out;
  for (const auto& [name, shape] :
       std::vector<std::pair<std::string, Shape>>{{"model.embed_tokens.weight", {37, 11}},
                                                  {"model.layers.0.mlp.up_proj.weight", {13, 7}},
                                                  {"model.layers.0.self_attn.o_proj.weight", {1, 29}},
                                                  {"model.norm.weight", {11}},
                                                  {"w", {23, 1}}}) {
    out.push_back({"model", name, shape, DType::bf16});
    out.push_back({"optimizer/m", name, shape, DType::f32});
    out.push_back({"optimizer/master", name, shape, DType::f64});
  }
  return out;
}

// Random bits: every kind of NaN, infinity and subnormal. `salt` sets saves apart.
inline std::vector<std::uint8_t> values_of(const Tensor& t, std::uint64_t salt) {
  const CounterRng rng(salt, t.group + "/" + t.name);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(t.shape.numel()) * size_of(t.dtype));
  for (std::size_t at = 0; at < out.size(); at += 8) {
    const std::uint64_t word = rng.bits(at / 8);
    std::memcpy(out.data() + at, &word, std::min<std::size_t>(8, out.size() - at));
  }
  return out;
}

// A rank's part: the tensors of a group lie one behind another and are cut into equal ranges, as optimiser shards are.
struct Shards {
  std::vector<Slice> slices;
  std::vector<std::vector<std::uint8_t>> memory;
};
inline Shards shards_of(const std::vector<Tensor>& tensors, int rank, int ranks, std::uint64_t salt) {
  Shards out;
  std::vector<std::string> groups;
  for (const Tensor& t : tensors) {
    if (std::find(groups.begin(), groups.end(), t.group) == groups.end()) groups.push_back(t.group);
  }
  for (const std::string& group : groups) {
    std::int64_t total = 0, at = 0;
    for (const Tensor& t : tensors) total += t.group == group ? t.shape.numel() : 0;
    const std::int64_t share = (total + ranks - 1) / ranks, from = share * rank, until = from + share;
    for (const Tensor& t : tensors) {
      if (t.group != group) continue;
      const std::int64_t begin = std::clamp<std::int64_t>(from - at, 0, t.shape.numel());
      const std::int64_t end = std::clamp<std::int64_t>(until - at, 0, t.shape.numel());
      at += t.shape.numel();
      const auto all = values_of(t, salt);
      const auto size = static_cast<std::int64_t>(size_of(t.dtype));
      out.memory.emplace_back(all.begin() + begin * size, all.begin() + end * size);
      out.slices.push_back(
          {t.group, t.name, t.shape, begin, {out.memory.back().data(), t.dtype, DeviceKind::cpu, {end - begin}}});
    }
  }
  return out;
}

inline Meta meta_of(std::int64_t step) {
  Meta m{step,   step * 4096, 1 << 30, "[train]\nsteps = 9 # \"é\"\n", "abc", {step, 7}, ~std::uint64_t{0},
         "bf16", 3,           "test"};
  return m;
}

// Writes a checkpoint as `ranks` ranks would, in this process.
inline void save_as(int ranks, const std::string& folder, const std::vector<Tensor>& tensors, std::int64_t step) {
  std::vector<ShardReport> reports;
  for (int r = 0; r < ranks; ++r) {
    const Shards shards = shards_of(tensors, r, ranks, static_cast<std::uint64_t>(step));
    reports.push_back(write_shard({folder + ".tmp", r, step, shards.slices, {}}));
  }
  const auto rename = [&] { commit_rename(folder + ".tmp", folder, folder + ".displaced"); };
  commit(folder + ".tmp", rename, meta_of(step), std::move(reports));
}

// Reads [begin, begin + count) in its own type over memory full of 0xAA and compares bits.
inline ::testing::AssertionResult holds_range(const Checkpoint& c, const Tensor& t, std::uint64_t salt,
                                              std::int64_t begin, std::int64_t count) {
  const auto all = values_of(t, salt);
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  std::vector<std::uint8_t> out(static_cast<std::size_t>(count * size + 8), 0xAA);
  c.read(t.group, t.name, begin, {out.data(), t.dtype, DeviceKind::cpu, {count}});
  if (!std::equal(out.end() - 8, out.end(), std::vector<std::uint8_t>(8, 0xAA).begin())) {
    return ::testing::AssertionFailure() << t.group << "/" << t.name << ": wrote past the end";
  }
  if (std::memcmp(out.data(), all.data() + begin * size, static_cast<std::size_t>(count * size)) != 0) {
    return ::testing::AssertionFailure() << t.group << "/" << t.name << ": elements " << begin << "+" << count
                                         << " differ";
  }
  return ::testing::AssertionSuccess();
}
inline void expect_holds(const Checkpoint& c, const std::vector<Tensor>& tensors, std::uint64_t salt) {
  EXPECT_EQ(c.tensors().size(), tensors.size());
  for (const Tensor& t : tensors) EXPECT_TRUE(holds_range(c, t, salt, 0, t.shape.numel()));
}

// The message of the CheckpointError that `work` throws; empty if it throws none.
template <class Work>
std::string checkpoint_error(const Work& work) {
  try {
    work();
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "";
}
inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), text.npos) << "no \"" << part << "\" in: " << text;
}

inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) out.push_back(entry.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}
inline void spit(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

// Rewrites a checkpoint's manifest, checksum and all.
template <class Edit>
void edit_manifest(const std::string& folder, const Edit& edit) {
  Manifest m = parse_manifest(slurp(folder + "/manifest.json"), "test");
  edit(m);
  spit(folder + "/manifest.json", to_text(m));
}
// After a shard was changed: its size in the manifest.
inline void correct_size(const std::string& folder, const std::string& file) {
  edit_manifest(folder, [&](Manifest& m) {
    for (auto& f : m.files) {
      if (f.name == file) f.bytes = static_cast<std::int64_t>(std::filesystem::file_size(folder + "/" + file));
    }
  });
}

}  // namespace annulus::checkpoint::testing
