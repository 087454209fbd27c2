"""What a step does with gradients: parameter groups, schedule, Muon, small optimizer states,
averages of the weights, and the guard against spikes."""
