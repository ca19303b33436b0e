#pragma once

#include "ballast/plan/plan.h"

namespace ballast::step {

// Types that this module writes, and its inputs.
using plan::Action;
using plan::Boundary;
using plan::Buffer;
using plan::BufferId;
using plan::Condition;
using plan::Kind;
using plan::kNoBuffer;
using plan::kNoLabel;
using plan::kNoOp;
using plan::Lane;
using plan::Operation;
using plan::OpId;
using plan::Payload;
using plan::Plan;
using plan::RankGroup;
using plan::Role;
using plan::Schedule;
using plan::Speculation;
using plan::Speed;
using plan::Use;

}  // namespace ballast::step
