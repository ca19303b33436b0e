#include "src/schedule/reference_passes.h"

#include <utility>

namespace ballast::schedule {

using model::Port;

void ReferencePasses::forward(std::uint32_t block, std::uint32_t micro, BufferId input) {
  if (!work_.has_reference() || !work_.is_differentiated(block)) return;
  if (block == work_.first_differentiated) inputs_[micro] = input;
  const BufferId out = slots_.next();
  std::vector<Use> uses = {{role_of(Port::weights), move_.weights_on_device(block), false},
                           {role_of(Port::input), inputs_[micro], false},
                           {role_of(Port::output), out, true},
                           {role_of(Port::workspace), layout_.workspace, true}};
  if (work_.packed) uses.push_back({role_of(Port::batch), layout_.batch_device[micro], false});
  move_.emit({.block = block,
              .micro = micro,
              .label = label_of(model::Kernel::layer, true),
              .flops = work_.blocks[block].forward_flops,
              .uses = std::move(uses)});
  inputs_[micro] = out;
}

void ReferencePasses::evaluate_head(std::uint32_t micro) {
  if (!work_.has_reference()) return;
  if (head_.tiles() == 1) return head_.evaluate(micro, inputs_[micro], true);
  normalize_for_head(micro);
  for (std::uint32_t t = 0; t < head_.tiles(); ++t) scan_head(t, micro);
}

void ReferencePasses::normalize_for_head(std::uint32_t micro) {
  if (work_.has_reference()) tiles_.normalize_reference(micro, inputs_[micro]);
}

void ReferencePasses::scan_head(std::uint32_t tile, std::uint32_t micro) {
  if (work_.has_reference()) head_.scan(tile, micro, true);
}

}  // namespace ballast::schedule
