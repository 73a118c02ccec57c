// The safetensors reader and writer: every kind of damage and of lie is refused with the tensor's name, and what is
// written is read back bit for bit.
#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "checkpoint/convert_type.h"
#include "fixture.h"

namespace annulus::checkpoint {
namespace {

using testing::TempFolder;

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string file_of(const std::string& header, const std::string& data, std::int64_t length = -1) {
  const std::uint64_t n = length < 0 ? header.size() : static_cast<std::uint64_t>(length);
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

// What opening such a file says; "" if it is opened.
std::string complaint(const std::string& bytes) {
  const TempFolder folder;
  write_bytes(folder / "m.safetensors", bytes);
  try {
    (void)SafetensorsFile(folder / "m.safetensors");
    return "";
  } catch (const CheckpointError& e) {
    return e.what();
  }
}

std::string complaint(const std::string& header, std::size_t data) {
  return complaint(file_of(header, std::string(data, 'x')));
}

TEST(Safetensors, WhatIsRight) {
  EXPECT_EQ(complaint("{}", 0), "");
  EXPECT_EQ(complaint(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}   )", 24), "");
  // Scalars and empty tensors are legal, and an entry may come in any order.
  EXPECT_EQ(complaint(R"({"__metadata__":{"format":"pt"},"z":{"dtype":"BF16","shape":[3,0],"data_offsets":[4,4]},)"
                      R"("s":{"dtype":"F32","shape":[],"data_offsets":[4,8]},)"
                      R"("b":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}})",
                      8),
            "");
}

TEST(Safetensors, WhatIsWrongIsNamed) {
  struct Case {
    std::string bytes, says;
  };
  const auto entry = [](const std::string& fields) { return R"({"model.w":{)" + fields + "}}"; };
  const auto with = [&](const std::string& fields, std::size_t data) {
    return file_of(entry(fields), std::string(data, 'x'));
  };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::vector<Case> cases{
      // The length and the header.
      {"", "0 bytes"},
      {"1234567", "7 bytes"},
      {file_of("{}", "", 3), "the header takes 3 bytes, the file has 2"},
      {file_of("{}", "", 100'000'001), "a header of 100000001 bytes"},
      {std::string(8, '\xff') + "{}", "a header of 18446744073709551615 bytes"},
      {file_of("", ""), "not a JSON object"},
      {file_of(" {}", ""), "not a JSON object"},
      {file_of("{}\n", ""), "not a JSON object"},
      {file_of("[]", ""), "not a JSON object"},
      {file_of(R"({"a":})", ""), "not JSON"},
      {file_of("{\"a\xff\":{}}", ""), "not JSON"},
      {file_of(R"({"a":[[[[[[1]]]]]]})", ""), "nested deeper"},
      {file_of(std::string(100'000, '[') + "}", ""), "not a JSON object"},
      {file_of("{\"a\":" + std::string(100'000, '[') + "}", ""), "nested deeper"},
      // Names.
      {file_of(R"({"model.w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
               R"("model.w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
               "12345678"),
       "\"model.w\" is there twice"},
      {file_of(R"({"__metadata__":{"format":1}})", ""), "__metadata__"},
      {file_of(R"({"model.w":7})", ""), "tensor \"model.w\": wanted"},
      {with(R"("dtype":"F32","shape":[2])", 8), "tensor \"model.w\": wanted"},
      {with(good + R"(,"extra":1)", 8), "tensor \"model.w\": wanted"},
      {with(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])", 8), "\"dtype\" is there twice"},
      // Types.
      {with(R"("dtype":"I64","shape":[1],"data_offsets":[0,8])", 8), "\"model.w\": \"dtype\" is \"I64\""},
      {with(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])", 8), "\"model.w\": \"dtype\" is \"F8_E4M3\""},
      {with(R"("dtype":3,"shape":[1],"data_offsets":[0,8])", 8), "\"model.w\": \"dtype\" is 3"},
      // Shapes.
      {with(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", 8), "\"model.w\": \"shape\" holds -2"},
      {with(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])", 8), "\"model.w\": \"shape\" holds 2.0"},
      {with(R"("dtype":"F32","shape":[1,1,1,1,1,2],"data_offsets":[0,8])", 8), "\"model.w\": \"shape\" is not"},
      {with(R"("dtype":"F32","shape":{"a":2},"data_offsets":[0,8])", 8), "\"model.w\": \"shape\" is not"},
      {with(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])", 8), "more bytes than 64 bits"},
      {with(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8])", 8), "more bytes than 64 bits"},
      {with(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])", 8), "holds 18446744073709551615"},
      {with(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", 8), "\"model.w\": shape [3] of F32 takes 12 bytes"},
      {with(R"("dtype":"F16","shape":[2],"data_offsets":[0,8])", 8), "\"model.w\": shape [2] of F16 takes 4 bytes"},
      // Offsets.
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[0,9])", 8), "\"model.w\": \"data_offsets\" [0,9]"},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", 8), "\"model.w\": \"data_offsets\" [8,0]"},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])", 8), "\"model.w\": \"data_offsets\" [-8,0]"},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[0])", 8), "\"model.w\": \"data_offsets\" [0]"},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551616])", 8),
       "\"model.w\": \"data_offsets\""},
      {with(good, 7), "\"model.w\": \"data_offsets\" [0,8] do not lie in the 7 bytes"},
      {with(good, 9), "the tensors take 8 bytes, the file has 9"},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[1,9])", 9), "\"model.w\" starts at byte 1"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
               R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
               std::string(12, 'x')),
       "\"b\" starts at byte 4 of the values, where 8 was wanted: an overlap"},
      {file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
               R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
               std::string(12, 'x')),
       "\"b\" starts at byte 8 of the values, where 4 was wanted: a gap"},
  };
  for (const Case& c : cases) {
    const std::string said = complaint(c.bytes);
    EXPECT_NE(said.find(c.says), std::string::npos) << "wanted: " << c.says << "\nsaid: " << said;
    EXPECT_NE(said.find("m.safetensors"), std::string::npos) << said;
  }
}

TEST(Safetensors, FilesOnlyNoLinksNoFolders) {
  const TempFolder folder;
  write_bytes(folder / "real", file_of("{}", ""));
  std::filesystem::create_symlink(folder / "real", folder / "link");
  std::filesystem::create_directory(folder / "folder");
  EXPECT_NO_THROW(SafetensorsFile(folder / "real"));
  for (const char* name : {"link", "folder", "missing", "/dev/zero"}) {
    EXPECT_THROW(SafetensorsFile(name[0] == '/' ? name : folder / name), CheckpointError) << name;
  }
}

TEST(Safetensors, WrittenIsReadBitForBit) {
  const TempFolder folder;
  std::vector<std::vector<std::uint8_t>> memory;
  std::vector<Slice> slices;
  for (const auto& [name, dtype, shape] :
       std::vector<std::tuple<std::string, DType, Shape>>{{"a", DType::bf16, {3, 5}},
                                                          {"b", DType::f32, {1'500'000}},
                                                          {"c \"é\"", DType::f64, {2, 2}},
                                                          {"d", DType::bf16, {1}}}) {
    memory.push_back(testing::values_of({"model", name, shape, dtype}, 7));
    slices.push_back({"model", name, shape, 0, {memory.back().data(), dtype, DeviceKind::cpu, {shape.numel()}}});
  }
  std::vector<const Slice*> pointers;
  for (const Slice& s : slices) pointers.push_back(&s);
  const std::string path = folder / "m.safetensors";
  const std::int64_t bytes = write_safetensors(path, pointers);
  EXPECT_EQ(bytes, file_size(path));
  EXPECT_THROW(write_safetensors(path, pointers), CheckpointError) << "a file that is there is not written over";
  const SafetensorsFile file(path);
  ASSERT_EQ(file.entries().size(), slices.size());
  std::size_t widest = 8;
  for (const SafetensorsEntry& e : file.entries()) {
    EXPECT_LE(size_of(e.dtype), widest) << "values are aligned when larger types come first";
    widest = size_of(e.dtype);
    const auto s = std::find_if(slices.begin(), slices.end(), [&](const Slice& x) { return x.tensor == e.name; });
    ASSERT_NE(s, slices.end());
    EXPECT_EQ(e.shape, s->global_shape);
    std::vector<std::uint8_t> out(static_cast<std::size_t>(s->data.bytes()), 0xAA);
    file.read(e, 0, {out.data(), e.dtype, DeviceKind::cpu, {e.shape.numel()}});
    EXPECT_EQ(out, memory[static_cast<std::size_t>(s - slices.begin())]) << e.name;
    if (e.shape.numel() < 3) continue;
    std::vector<std::uint8_t> part(static_cast<std::size_t>(2 * size_of(e.dtype)));
    file.read(e, 1, {part.data(), e.dtype, DeviceKind::cpu, {2}});
    EXPECT_TRUE(std::equal(part.begin(), part.end(), out.begin() + static_cast<std::ptrdiff_t>(size_of(e.dtype))));
  }
}

// Against the definition: sign · 2^(exponent − 15) · 1.mantissa, all 65,536 of them.
TEST(Safetensors, EveryHalfIsItsValue) {
  std::vector<Float16> in(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) in[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> narrow(65536);
  std::vector<double> wide(65536);
  convert_type(DType::f16, in.data(), DType::f32, narrow.data(), 65536);
  convert_type(DType::f16, in.data(), DType::f64, wide.data(), 65536);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31u), mantissa = static_cast<int>(i & 1023u);
    const double size = exponent == 0    ? std::ldexp(mantissa, -24)
                        : exponent == 31 ? (mantissa == 0 ? HUGE_VAL : std::nan(""))
                                         : std::ldexp(1024 + mantissa, exponent - 25);
    if (std::isnan(size)) {
      EXPECT_TRUE(std::isnan(narrow[i]) && std::isnan(wide[i])) << i;
      continue;
    }
    EXPECT_EQ(wide[i], i < 32768 ? size : -size) << i;
    EXPECT_EQ(static_cast<double>(narrow[i]), wide[i]) << i;
    EXPECT_EQ(std::signbit(narrow[i]), i >= 32768) << i;
  }
  BFloat16 rounded{};
  const Float16 third{0x3555};  // 0.333251953125 -> the nearest bf16 is 0.333984375
  convert_type(DType::f16, &third, DType::bf16, &rounded, 1);
  EXPECT_EQ(to_float(rounded), 0.333984375f);
}

}  // namespace
}  // namespace annulus::checkpoint
