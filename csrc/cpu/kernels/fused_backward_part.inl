// The tasks of the fused backward (core/backward_plan.h) in panels and groups of them.

// Which part of the work: of a key/value head one range of keys, one range of queries, and the wave they meet in.
struct BackwardTurn {
  int64_t head, keys, queries, wave;
  int64_t slot;  // of the workspace
};

// What one task adds up: what some queries of a key/value head contribute to some keys and the reverse.
struct BackwardPart {
  int64_t head, slot;
  KeyRange keys;
  int64_t first_group, groups;  // of all query heads that share the head
  bool want_query, want_key, want_value;
  bool want_bias;
  bool first, last;  // sums begin here; they are complete afterwards
  bool only_finite;  // elements that are not finite count as zero, and are added where their weight is not
};

// Neighbouring panels of one query head.
struct PanelGroup {
  int64_t entry, first;
  int count;
};

template <class Acc>
struct BackwardSplit {
  BackwardPlan plan;
  PanelSpread panels;                // of one query head
  int64_t head_panels, head_groups;  // of one query head
  int64_t key_blocks, groups;        // of one key/value head
  int64_t first_series, series;      // of the wave at hand; the last may have fewer

  explicit BackwardSplit(const FusedBackward& p)
      : plan(backward_plan(p)),
        panels(PanelSpread::of<Acc>(p.queries)),
        head_panels(panels.panels),
        head_groups(ceil_div(head_panels, kGroupPanels<Acc>)),
        key_blocks(ceil_div(p.keys, kGradKeys)),
        groups(head_groups * p.group),
        first_series(p.wave / plan.ranges * plan.at_once),
        series(max_of(0, min_of(plan.at_once, plan.series - first_series))) {}

  int64_t tasks() const { return series * plan.ranges; }

  // Head `place` of the task's series.
  BackwardTurn turn(const FusedBackward& p, int64_t task, int64_t place) const {
    const int64_t keys = task % plan.ranges, wave = p.wave % plan.ranges, index = task / plan.ranges;
    int64_t head = first_series + index;
    if (plan.has_bias) head = plan.sharing.entry(head, place) / p.group;
    return {head, keys, (wave - keys + plan.ranges) % plan.ranges, wave, index * plan.series_length + place};
  }

  BackwardPart part(const FusedBackward& p, const BackwardTurn& turn) const {
    BackwardPart part;
    part.head = turn.head;
    part.slot = turn.slot;
    part.keys = {key_blocks * turn.keys / plan.ranges * kGradKeys,
                 min_of(key_blocks * (turn.keys + 1) / plan.ranges * kGradKeys, p.keys)};
    part.first_group = groups * turn.queries / plan.ranges;
    part.groups = groups * (turn.queries + 1) / plan.ranges - part.first_group;
    part.want_query = static_cast<bool>(p.grad_query);
    part.want_key = static_cast<bool>(p.grad_key);
    part.want_value = static_cast<bool>(p.grad_value);
    part.want_bias = plan.has_bias;
    part.first = turn.wave == 0;
    part.last = turn.wave == plan.ranges - 1;
    part.only_finite = false;
    return part;
  }

  // `index` counts through all query heads that share the head.
  PanelGroup group(const FusedBackward& p, int64_t head, int64_t index) const {
    const int64_t of_head = index % head_groups, first = head_panels * of_head / head_groups;
    return {head * p.group + index / head_groups, first,
            static_cast<int>(head_panels * (of_head + 1) / head_groups - first)};
  }

  // Lanes in front of a panel of a group, and of a group, those of all query heads in a row.
  int64_t lane_of(int64_t group, int64_t panel) const {
    return (group / head_groups * panels.vectors + panels.first_vector(panel)) * kLanes<Acc>;
  }
  int64_t first_lane(int64_t group) const { return lane_of(group, head_panels * (group % head_groups) / head_groups); }

  // "Zero hides": the plain products make NaN of 0 * NaN. Where results of a turn are not finite, all waves of them run
  // once more with only_finite: those of its queries with all keys, or of its keys with all queries.
  BackwardPart only_queries(const FusedBackward& p, const BackwardTurn& turn, int64_t wave) const {
    BackwardPart again = once_more(p, turn, (wave - turn.queries + plan.ranges) % plan.ranges, turn.queries, wave);
    again.want_key = again.want_value = false;
    return again;
  }
  BackwardPart only_keys(const FusedBackward& p, const BackwardTurn& turn, int64_t wave) const {
    BackwardPart again = once_more(p, turn, turn.keys, (wave - turn.keys + plan.ranges) % plan.ranges, wave);
    again.want_query = false;
    return again;
  }

 private:
  BackwardPart once_more(const FusedBackward& p, BackwardTurn turn, int64_t keys, int64_t queries, int64_t wave) const {
    turn.keys = keys;
    turn.queries = queries;
    turn.wave = wave;
    BackwardPart again = part(p, turn);
    again.want_bias = false;  // no product makes it
    again.only_finite = true;
    return again;
  }
};
