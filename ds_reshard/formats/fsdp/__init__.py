"""Folders of EasyR1 and verl: `{model,optim,extra_state}_world_size_W_rank_R.pt`."""
