// checkpoint.h5 and the shards, looked at as h5py and h5dump do: through HDF5 alone, from any working directory.
#include "fixture.h"
#include "hdf5_api.h"

namespace annulus::checkpoint {
namespace {

using namespace testing;

std::string text_attribute(hid_t object, const char* name) {
  const hid_t attribute = H5Aopen(object, name, H5P_DEFAULT), type = H5Aget_type(attribute);
  std::string text(H5Tget_size(type), '\0');
  EXPECT_GE(H5Aread(attribute, type, text.data()), 0);
  H5Tclose(type);
  H5Aclose(attribute);
  return text;
}

std::vector<std::int64_t> number_attribute(hid_t object, const char* name) {
  const hid_t attribute = H5Aopen(object, name, H5P_DEFAULT), space = H5Aget_space(attribute);
  std::vector<std::int64_t> out(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
  EXPECT_GE(H5Aread(attribute, H5T_NATIVE_INT64, out.data()), 0);
  H5Sclose(space);
  H5Aclose(attribute);
  return out;
}

TEST(VirtualFile, HoldsEveryTensorWhole) {
  const TempFolder run;
  const auto model = small_model();
  save_as(4, run / "before", model, 2);  // cuts rows
  std::filesystem::rename(run / "before",
                          run / "after");  // names of shards are relative to the file, so folders may move
  const hid_t file = H5Fopen((run / "after/checkpoint.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  EXPECT_EQ(text_attribute(file, "step"), "2");
  EXPECT_EQ(text_attribute(file, "config"), meta_of(2).config);
  for (const Tensor& t : model) {
    const hid_t data = H5Dopen2(file, ("/" + t.group + "/" + t.name).c_str(), H5P_DEFAULT);
    ASSERT_GE(data, 0) << t.name;
    const hid_t type = H5Dget_type(data), space = H5Dget_space(data);
    EXPECT_EQ(H5Tget_class(type), H5T_FLOAT);
    EXPECT_EQ(H5Tget_size(type), size_of(t.dtype));
    EXPECT_EQ(text_attribute(data, "dtype"), name_of(t.dtype));
    EXPECT_EQ(H5Sget_simple_extent_ndims(space), t.shape.rank());
    std::vector<std::uint8_t> values(static_cast<std::size_t>(t.shape.numel()) * size_of(t.dtype), 0xAA);
    ASSERT_EQ(H5Sget_simple_extent_npoints(space), t.shape.numel());
    EXPECT_GE(H5Dread(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), 0);
    EXPECT_EQ(values, values_of(t, 2)) << t.group << "/" << t.name;
    H5Sclose(space);
    H5Tclose(type);
    H5Dclose(data);
  }
  H5Fclose(file);
}

TEST(VirtualFile, Bf16IsANumberToHdf5) {
  const TempFolder run;
  std::vector<BFloat16> x{
      annulus::to_bfloat16(1.5f), annulus::to_bfloat16(-3.25f), {0x7f80}, annulus::to_bfloat16(1e-20f)};
  write_folder(run / "c", meta_of(1), {{"model", "x", {4}, 0, host_view(x.data(), {4})}});
  const hid_t file = H5Fopen((run / "c/checkpoint.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t data = H5Dopen2(file, "/model/x", H5P_DEFAULT);
  std::vector<float> as_float(4);
  EXPECT_GE(H5Dread(data, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, as_float.data()), 0);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(as_float[i], to_float(x[i]));
  H5Dclose(data);
  H5Fclose(file);
}

TEST(VirtualFile, ShardsHoldPiecesWithTheirPlace) {
  const TempFolder run;
  std::vector<float> x(12);
  // Elements 2 to 14 of [4, 5]: the end of row 0, row 1, the start of row 2.
  const ShardReport report =
      write_shard({run / "s", 0, 1, {{"optimizer/m", "x", {4, 5}, 2, host_view(x.data(), {12})}}, {}});
  ASSERT_EQ(report.pieces.size(), 3u);
  const hid_t file = H5Fopen((run / "s/shard-00000.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const std::vector<std::vector<std::int64_t>> offsets{{0, 2}, {1, 0}, {2, 0}}, shapes{{1, 3}, {1, 5}, {1, 4}};
  const std::vector<std::string> names{"/optimizer/m/x@2", "/optimizer/m/x@5", "/optimizer/m/x@10"};
  for (std::size_t i = 0; i < 3; ++i) {
    const hid_t data = H5Dopen2(file, names[i].c_str(), H5P_DEFAULT);
    ASSERT_GE(data, 0);
    EXPECT_EQ(number_attribute(data, "offset"), offsets[i]);
    EXPECT_EQ(number_attribute(data, "global_shape"), (std::vector<std::int64_t>{4, 5}));
    EXPECT_EQ(text_attribute(data, "dtype"), "float32");
    const hid_t space = H5Dget_space(data);
    hsize_t dims[2];
    H5Sget_simple_extent_dims(space, dims, nullptr);
    EXPECT_EQ((std::vector<std::int64_t>{static_cast<std::int64_t>(dims[0]), static_cast<std::int64_t>(dims[1])}),
              shapes[i]);
    H5Sclose(space);
    H5Dclose(data);
  }
  H5Fclose(file);
}

TEST(VirtualFile, ShardsAreChunked) {
  const TempFolder run;
  std::vector<float> x(3000000);  // 11.4 MiB
  write_shard({run / "s", 0, 1, {{"model", "x", {3000, 1000}, 0, host_view(x.data(), {3000000})}}, {}});
  const hid_t file = H5Fopen((run / "s/shard-00000.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t data = H5Dopen2(file, "/model/x@0", H5P_DEFAULT), list = H5Dget_create_plist(data);
  hsize_t chunk[2];
  ASSERT_EQ(H5Pget_chunk(list, 2, chunk), 2);
  EXPECT_EQ(chunk[0], 1000u);  // three chunks of 3.8 MiB, none of them partly used
  EXPECT_EQ(chunk[1], 1000u);
  H5Pclose(list);
  H5Dclose(data);
  H5Fclose(file);
}

}  // namespace
}  // namespace annulus::checkpoint
