// Damaged and crafted checkpoints: what the files hold is compared with the manifest before anything is believed.
#include <sys/stat.h>

#include "fixture.h"
#include "hdf5_api.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;
namespace fs = std::filesystem;

class Damage : public ::testing::Test {
 protected:
  void SetUp() override {
    save_as(2, folder_, small_model(), 3);
    EXPECT_EQ(error(), "");
  }
  std::string error() {
    return checkpoint_error([&] { Checkpoint::open(folder_).verify(); });
  }
  std::string read_error(const Tensor& t) {
    return checkpoint_error([&] { holds_range(Checkpoint::open(folder_), t, 3, 0, t.shape.numel()); });
  }
  // Opens a shard to plant something in it, then makes the manifest's size right.
  template <class Plant>
  void plant(const Plant& work) {
    const hid_t file = H5Fopen(shard_.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    ASSERT_GE(file, 0);
    work(file);
    ASSERT_GE(H5Fclose(file), 0);
    correct_size(folder_, "shard-00000.h5");
  }
  void remove_dataset(hid_t file) { ASSERT_GE(H5Ldelete(file, kVictim, H5P_DEFAULT), 0); }
  // A dataset of the right name with another type, shape or storage; space and list are closed here.
  void make_dataset(hid_t file, hid_t type, std::vector<hsize_t> dims, hid_t list = H5P_DEFAULT, bool write = true) {
    const hid_t space = H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr);
    const hid_t data = H5Dcreate2(file, kVictim, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    ASSERT_GE(data, 0);
    std::vector<char> zeros(1 << 16);
    if (write) {
      ASSERT_GE(H5Dwrite(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros.data()), 0);
    }
    H5Dclose(data);
    H5Sclose(space);
  }

  static constexpr const char* kVictim = "/optimizer/m/model.embed_tokens.weight@0";  // [25, 11] float32 on rank 0
  const Tensor victim_{"optimizer/m", "model.embed_tokens.weight", {37, 11}, DType::f32};
  TempFolder run_;
  std::string folder_ = run_ / "step-00000003", shard_ = folder_ + "/shard-00000.h5";
};

TEST_F(Damage, FilesGoneOrOfAnotherSize) {
  const std::string shard = slurp(shard_), manifest = slurp(folder_ + "/manifest.json");
  spit(shard_, shard.substr(0, shard.size() - 1000));
  expect_parts(error(), {"shard-00000.h5", fmt::format("wanted {} bytes", shard.size()),
                         fmt::format("found {}", shard.size() - 1000)});
  spit(shard_, shard + "x");
  expect_parts(error(), {"shard-00000.h5", "wanted", "found"});
  fs::remove(shard_);
  expect_parts(error(), {"shard-00000.h5", "missing"});
  fs::create_directory(shard_);
  expect_parts(error(), {"shard-00000.h5", "not a regular file"});
  fs::remove(shard_);
  spit(run_ / "elsewhere", shard);
  fs::create_symlink(run_ / "elsewhere", shard_);
  expect_parts(error(), {"shard-00000.h5", "not a regular file"});
  fs::remove(shard_);
  spit(shard_, shard);
  EXPECT_EQ(error(), "");

  fs::remove(folder_ + "/manifest.json");
  expect_parts(error(), {folder_, "no manifest.json"});
  spit(folder_ + "/manifest.json", manifest);
  fs::remove(folder_ + "/checkpoint.h5");
  expect_parts(error(), {"checkpoint.h5", "missing"});
}

// Every byte of a value counts. Bytes of HDF5's own structure are caught by its checksums, by the walk, or do not
// matter: then all values must still be right.
TEST_F(Damage, AnyFlippedBit) {
  const std::string shard = slurp(shard_);
  const auto model = small_model();
  const auto values = values_of(victim_, 3);
  const auto at = shard.find(std::string(reinterpret_cast<const char*>(values.data()), 64));
  ASSERT_NE(at, shard.npos);
  int caught = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    std::string bad = shard;
    bad[i * shard.size() / 300] ^= static_cast<char>(1 << (i % 8));
    spit(shard_, bad);
    const std::string found = error();
    caught += !found.empty();
    if (found.empty()) {
      expect_holds(Checkpoint::open(folder_), model, 3);
    } else {
      EXPECT_NE(found.find("shard-00000.h5"), found.npos) << found;
    }
  }
  EXPECT_GT(caught, 50);
  std::string bad = shard;
  bad[at + 11] ^= 4;
  spit(shard_, bad);
  expect_parts(error(),
               {"shard-00000.h5", "optimizer/m/model.embed_tokens.weight", "wanted XXH3-128", "found", "damaged"});
}

TEST_F(Damage, AShardOfAnotherSave) {
  save_as(2, run_ / "other", small_model(), 4);
  fs::copy_file(run_ / "other/shard-00000.h5", shard_, fs::copy_options::overwrite_existing);
  expect_parts(error(), {"shard-00000.h5", "XXH3-128"});
  spit(shard_, std::string(static_cast<std::size_t>(fs::file_size(shard_)), 'x'));
  expect_parts(error(), {"shard-00000.h5", "H5Fopen"});
}

TEST_F(Damage, Links) {
  save_as(2, run_ / "other", small_model(), 3);
  plant([&](hid_t file) {
    remove_dataset(file);
    ASSERT_GE(
        H5Lcreate_external((run_ / "other/shard-00000.h5").c_str(), kVictim, file, kVictim, H5P_DEFAULT, H5P_DEFAULT),
        0);
  });
  expect_parts(error(), {"shard-00000.h5", kVictim, "hard link", "external link"});
  expect_parts(read_error(victim_), {"hard link", "external link"});
  plant([&](hid_t file) {
    remove_dataset(file);
    ASSERT_GE(H5Lcreate_soft("/optimizer/m/w@0", file, kVictim, H5P_DEFAULT, H5P_DEFAULT), 0);
  });
  expect_parts(error(), {"hard link", "soft link"});
  expect_parts(read_error(victim_), {"hard link", "soft link"});
}

TEST_F(Damage, ALinkedGroup) {
  plant([&](hid_t file) {
    ASSERT_GE(H5Lmove(file, "/optimizer/m", file, "/moved", H5P_DEFAULT, H5P_DEFAULT), 0);
    ASSERT_GE(H5Lcreate_soft("/moved", file, "/optimizer/m", H5P_DEFAULT, H5P_DEFAULT), 0);
  });
  expect_parts(error(), {"shard-00000.h5", "hard link", "soft link"});
  expect_parts(read_error(victim_), {"hard link", "soft link"});
}

TEST_F(Damage, AGroupThatContainsItself) {
  plant([&](hid_t file) {
    ASSERT_GE(H5Lcreate_hard(file, "/optimizer", file, "/optimizer/m/loop", H5P_DEFAULT, H5P_DEFAULT), 0);
  });
  expect_parts(error(), {"shard-00000.h5", "nested too deeply"});
}

TEST_F(Damage, VirtualDataset) {
  save_as(2, run_ / "other", small_model(), 3);
  plant([&](hid_t file) {
    remove_dataset(file);
    const hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t dims[] = {25, 11};
    const hid_t space = H5Screate_simple(2, dims, nullptr);
    ASSERT_GE(H5Pset_virtual(list, space, (run_ / "other/shard-00000.h5").c_str(), kVictim, space), 0);
    make_dataset(file, H5T_IEEE_F32LE, {25, 11}, list, false);
    H5Sclose(space);
    H5Pclose(list);
  });
  expect_parts(error(), {"shard-00000.h5", kVictim, "virtual"});
  expect_parts(read_error(victim_), {"virtual"});
}

TEST_F(Damage, ExternalStorage) {
  spit(run_ / "secret", std::string(4096, 's'));
  plant([&](hid_t file) {
    remove_dataset(file);
    const hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    ASSERT_GE(H5Pset_external(list, (run_ / "secret").c_str(), 0, 25 * 11 * 4), 0);
    make_dataset(file, H5T_IEEE_F32LE, {25, 11}, list, false);
    H5Pclose(list);
  });
  expect_parts(error(), {"shard-00000.h5", kVictim, "external storage"});
  expect_parts(read_error(victim_), {"external storage"});
}

TEST_F(Damage, OtherShapeTypeOrStorage) {
  const auto replace = [&](hid_t type, std::vector<hsize_t> dims, hid_t list = H5P_DEFAULT, bool write = true) {
    plant([&](hid_t file) {
      remove_dataset(file);
      make_dataset(file, type, dims, list, write);
    });
  };
  replace(H5T_IEEE_F32LE, {25, 12});
  expect_parts(error(), {"shard-00000.h5", kVictim, "wanted shape [25, 11]", "found 12 in dimension 1"});
  replace(H5T_IEEE_F32LE, {275});
  expect_parts(error(), {kVictim, "wanted shape [25, 11]", "1 dimensions"});
  replace(H5T_IEEE_F32LE, {1, 25, 11});
  expect_parts(error(), {kVictim, "wanted shape [25, 11]", "3 dimensions"});
  for (const hid_t type : {H5T_IEEE_F64LE, H5T_IEEE_F32BE, H5T_STD_I32LE}) {
    replace(type, {25, 11});
    expect_parts(error(), {kVictim, "wanted float32", "another type"});
    expect_parts(read_error(victim_), {"another type"});
  }
  const hid_t list = H5Pcreate(H5P_DATASET_CREATE);
  const hsize_t chunk[] = {5, 11};
  H5Pset_chunk(list, 2, chunk);
  replace(H5T_IEEE_F32LE, {25, 11}, list, false);  // declared, never written
  expect_parts(error(), {kVictim, "wanted 1100 bytes", "found 0 stored"});
  H5Pset_fletcher32(list);
  replace(H5T_IEEE_F32LE, {25, 11}, list);
  expect_parts(error(), {kVictim, "filter"});
  H5Pclose(list);
}

TEST_F(Damage, DatasetsTooManyOrTooFew) {
  plant([&](hid_t file) { remove_dataset(file); });
  expect_parts(error(), {"shard-00000.h5", kVictim});
  expect_parts(read_error(victim_), {kVictim});
  plant([&](hid_t file) {
    make_dataset(file, H5T_IEEE_F32LE, {25, 11});
    const hid_t group = H5Gcreate2(file, "/extra", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ASSERT_GE(H5Lcreate_hard(file, kVictim, group, "x", H5P_DEFAULT, H5P_DEFAULT), 0);
    H5Gclose(group);
  });
  expect_parts(error(), {"shard-00000.h5", "more datasets than"});
  plant([&](hid_t file) { remove_dataset(file); });
  expect_parts(error(), {"shard-00000.h5", "wanted dataset", "found /extra/x"});
  plant([&](hid_t file) {
    ASSERT_GE(H5Ldelete(file, "/extra", H5P_DEFAULT), 0);
    const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    ASSERT_GE(H5Tcommit2(file, "/type", type, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), 0);
    H5Tclose(type);
  });
  expect_parts(error(), {"shard-00000.h5", "/type", "neither a group nor a dataset"});
}

// Exactly one share of the work meets a damaged value.
TEST_F(Damage, VerifySharesCoverEverything) {
  const std::string shard = slurp(shard_);
  const auto values = values_of(victim_, 3);
  std::string bad = shard;
  bad[shard.find(std::string(reinterpret_cast<const char*>(values.data()), 64))] ^= 1;
  spit(shard_, bad);
  const Checkpoint c = Checkpoint::open(folder_);
  for (const int parts : {1, 2, 3, 7, 50}) {
    int failed = 0;
    for (int part = 0; part < parts; ++part) failed += !checkpoint_error([&] { c.verify(part, parts); }).empty();
    EXPECT_EQ(failed, 1) << parts;
  }
}

}  // namespace
}  // namespace annulus::checkpoint
