#pragma once

#include "ballast/schedule/build.h"
#include "ballast/schedule/placement.h"
#include "ballast/schedule/plan.h"
#include "ballast/schedule/rank_sizes.h"
#include "ballast/schedule/workload.h"

namespace ballast::step {

// What this module writes and what it is asked for.
using schedule::Action;
using schedule::BlockPlacement;
using schedule::BlockWork;
using schedule::Boundary;
using schedule::Buffer;
using schedule::BufferId;
using schedule::Condition;
using schedule::ExpertUpdates;
using schedule::Homes;
using schedule::in_one_pass;
using schedule::Kind;
using schedule::kNoBuffer;
using schedule::kNoLabel;
using schedule::kNoOp;
using schedule::Lane;
using schedule::Operation;
using schedule::OpId;
using schedule::Options;
using schedule::Order;
using schedule::Payload;
using schedule::Placement;
using schedule::Plan;
using schedule::Purpose;
using schedule::RankGroup;
using schedule::RankSizes;
using schedule::Role;
using schedule::Schedule;
using schedule::Speculation;
using schedule::Speed;
using schedule::SubGroup;
using schedule::Update;
using schedule::Use;
using schedule::Workload;
using schedule::written_in_background;

}  // namespace ballast::step
