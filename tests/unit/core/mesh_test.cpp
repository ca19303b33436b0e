#include <algorithm>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/places.h"

namespace ballast::mesh_test {
namespace {

using Members = std::vector<std::uint32_t>;

/// All meshes with at most 4 places in each direction.
std::vector<Mesh> small_meshes() {
  std::vector<Mesh> meshes;
  for (std::uint32_t data = 1; data <= 4; ++data) {
    for (std::uint32_t sequence = 1; sequence <= 4; ++sequence) {
      for (std::uint32_t tensor = 1; tensor <= 4; ++tensor) {
        meshes.push_back({.data = data, .sequence = sequence, .tensor = tensor});
      }
    }
  }
  return meshes;
}

/// Expects that `members_of` deals the ranks into disjoint groups on whose members they agree, with
/// each rank at its place in its group.
template <class MembersOf, class PlaceOf>
void expect_groups(Mesh mesh, std::uint32_t size, MembersOf members_of, PlaceOf place_of) {
  std::map<std::uint32_t, Members> by_rank;
  for (mesh.rank = 0; mesh.rank < mesh.ranks(); ++mesh.rank) {
    const Members members = members_of(mesh);
    ASSERT_EQ(members.size(), size);
    EXPECT_TRUE(std::ranges::is_sorted(members, std::ranges::less_equal())) << mesh.rank;
    EXPECT_EQ(members.at(place_of(mesh)), mesh.rank);
    for (const std::uint32_t member : members) {
      ASSERT_LT(member, mesh.ranks());
      const auto [at, is_new] = by_rank.try_emplace(member, members);
      EXPECT_EQ(at->second, members) << member;
    }
  }
  EXPECT_EQ(by_rank.size(), mesh.ranks());
}

TEST(Mesh, GroupsOfEachKindCoverAllRanksAndAgreeOnTheirMembers) {
  for (const Mesh& mesh : small_meshes()) {
    SCOPED_TRACE(testing::Message() << mesh.data << " x " << mesh.sequence << " x " << mesh.tensor);
    expect_groups(
        mesh, mesh.sharers(), [](const Mesh& m) { return m.sharer_ranks(); },
        [](const Mesh& m) { return m.sharer(); });
    expect_groups(
        mesh, mesh.sequence, [](const Mesh& m) { return m.sequence_ranks(); },
        [](const Mesh& m) { return m.sequence_place(); });
    expect_groups(
        mesh, mesh.tensor, [](const Mesh& m) { return m.tensor_ranks(); },
        [](const Mesh& m) { return m.tensor_place(); });
  }
}

TEST(Mesh, PlacesOfEveryRankAreUniqueAndLeadBackToIt) {
  for (Mesh mesh : small_meshes()) {
    for (mesh.rank = 0; mesh.rank < mesh.ranks(); ++mesh.rank) {
      EXPECT_LT(mesh.data_place(), mesh.data);
      EXPECT_EQ((mesh.data_place() * mesh.sequence + mesh.sequence_place()) * mesh.tensor +
                    mesh.tensor_place(),
                mesh.rank);
      EXPECT_EQ(mesh.rank_of(mesh.sharer()), mesh.rank);
      for (std::uint32_t sharer = 0; sharer < mesh.sharers(); ++sharer) {
        EXPECT_EQ(mesh.rank_of(sharer), mesh.sharer_ranks()[sharer]);
      }
    }
  }
}

TEST(Mesh, TensorPlacesAreNeighboursAndDataPlacesAreFarthestApart) {
  const Mesh mesh = {.data = 2, .sequence = 2, .tensor = 3, .rank = 4};
  EXPECT_EQ(mesh.tensor_ranks(), (Members{3, 4, 5}));
  EXPECT_EQ(mesh.sequence_ranks(), (Members{1, 4}));
  EXPECT_EQ(mesh.sharer_ranks(), (Members{1, 4, 7, 10}));
}

}  // namespace
}  // namespace ballast::mesh_test
