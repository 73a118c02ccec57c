// RoPE's frequencies and magnitudes against the values that HuggingFace's modeling_rope_utils (4.46, fp32) computes.
#include <gtest/gtest.h>

#include "model/layers.h"

namespace annulus::model {
namespace {

struct Case {
  RopeScaling scaling;
  double theta;
  std::vector<double> inv_freq;
  double magnitude;
};

TEST(Rope, FrequenciesAreHuggingFaces) {
  const std::vector<Case> cases = {
      {{.rope_type = "default"},
       10000,
       {1, 0.316227766, 0.1, 0.0316227766, 0.01, 0.00316227766, 0.001, 0.000316227766},
       1},
      {{.rope_type = "linear", .factor = 4},
       10000,
       {0.25, 0.079056941, 0.025, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05},
       1},
      {{.rope_type = "llama3", .factor = 8, .original_max_position_embeddings = 64},
       500000,
       {1, 0.079403013, 0.00470075384, 0.000911583134, 0.000176776681, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06},
       1},
      {{.rope_type = "yarn", .factor = 4, .original_max_position_embeddings = 64},
       10000,
       {1, 0.237170815, 0.049999997, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05},
       1.138629436111989},
      {{.rope_type = "yarn", .factor = 40, .original_max_position_embeddings = 4096, .attention_factor = 0.75},
       10000,
       {1, 0.316227764, 0.1, 0.0239147246, 0.00512499968, 0.000849862176, 2.5e-05, 7.90569447e-06},
       0.75}};
  for (const auto& c : cases) {
    ModelConfig config;
    config.head_dim = 16;
    config.rope_theta = c.theta;
    config.rope_scaling = c.scaling;
    const RopeFrequencies found = rope_frequencies(config);
    ASSERT_EQ(found.inv_freq.size(), c.inv_freq.size());
    for (std::size_t j = 0; j < c.inv_freq.size(); ++j) {
      // HuggingFace's fp32 pow and products: a few units in the last place.
      EXPECT_NEAR(found.inv_freq[j], c.inv_freq[j], 4 * 0x1p-23 * c.inv_freq[j])
          << c.scaling.rope_type << ", pair " << j;
    }
    EXPECT_DOUBLE_EQ(found.magnitude, c.magnitude) << c.scaling.rope_type;
  }
}

}  // namespace
}  // namespace annulus::model
