#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/engine/blueprint.h"
#include "ballast/plan/plan.h"
#include "ballast/plan/rates.h"

namespace ballast::plans {

/// One part of a dump.
struct PlanSection {
  std::string name;
  std::string text;  ///< lines; empty for a plan without operations
};

/// The names of the sections of each dump, in order.
std::vector<std::string> section_names();

/// All data of a placed run before it starts: buffers, each plan, the edges between plans that may
/// follow each other, and simulated steps. The order of buffers and of uses does not matter.
/// `blueprint` is sized and placed; its schedule is built here. Throws Error(state) if two buffers
/// have the same name.
std::vector<PlanSection> dump_plans(const engine::Blueprint& blueprint,
                                    const std::vector<plan::Rates>& rates);
/// Dumps without the first section, the placement.
std::vector<PlanSection> dump_plans(const step::Problem& problem, const step::Placement& place,
                                    const step::Options& options,
                                    const std::vector<plan::Rates>& rates);

/// The schedule and the plans that it lacks.
struct AllPlans {
  plan::Schedule schedule;
  struct Named {
    std::string name;
    plan::Plan plan;
  };
  std::vector<Named> plans;  ///< in normal order

  [[nodiscard]] const plan::Plan& find(const std::string& name) const;
};
AllPlans build_plans(const step::Problem& problem, const step::Placement& place,
                     const step::Options& options);

/// XXH3 of the text, 16 hexadecimal digits; "-" if it is empty.
std::string hash_of(const std::string& text);

}  // namespace ballast::plans
