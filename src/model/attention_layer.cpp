#include "model/attention_layer.h"

namespace annulus::model {

std::unique_ptr<AttentionLayer> make_attention_layer(const ModelConfig& config, std::int64_t layer) {
  const std::string name = "model.layers." + std::to_string(layer) + ".self_attn";
  switch (config.kind(layer)) {
    case AttentionKind::dense:
      return make_dense_layer(name, config);
    case AttentionKind::nsa:
      return make_nsa_layer(name, config);
  }
  throw Error("an attention kind without a layer");
}

}  // namespace annulus::model
